"""The budget ledger: every number once, other terms refused, forged and missing charges found."""

import pytest

from phalanx.errors import AuditLogError, ConfigError, PrivacyBudgetError
from phalanx.security.audit import AuditLog, verify_log
from phalanx.security.audit.line import read_entries
from phalanx.security.crypto import Identity
from phalanx.security.privacy import BudgetLedger, PastCharges
from phalanx.security.privacy.ledger import CHARGED, TERMS

IDENTITY = Identity.without_certificate("owner")


class LinearStep:
    """A mechanism of which each step spends one."""

    noise_multiplier, rate = 1.0, 0.1

    def epsilon_after(self, steps, delta):
        return float(steps)

    def affordable_steps(self, epsilon, delta, at_most):
        return min(int(epsilon), at_most)


def open_ledger(log, past=None, *, epsilon=3.0, session=100, **terms):
    return BudgetLedger(log, LinearStep(), epsilon, 1e-5, {"rows": 10, **terms}, past or PastCharges(), session)


@pytest.fixture
def log(tmp_path):
    with AuditLog(tmp_path / "events.jsonl", IDENTITY, "run") as log:
        yield log


def told(log):
    past = PastCharges()
    with log._path.open("rb") as file:
        for line in read_entries(file, log._path, IDENTITY.public, "run"):
            past.read_entry(line.kind, line.body)
    return past


def test_every_batch_gets_the_next_number_until_the_budget_is_spent(log):
    ledger = open_ledger(log)

    assert [ledger.charge_batch() for _ in range(3)] == [0, 1, 2]

    assert ledger.is_spent
    assert ledger.epsilon_spent == 3.0
    with pytest.raises(PrivacyBudgetError, match=r"3 steps have spent epsilon 3.000 of 3.0"):
        ledger.charge_batch()


def test_what_the_log_tells_is_what_a_later_session_goes_on_from(log):
    first = open_ledger(log)
    first.charge_batch()
    first.charge_batch()

    later = open_ledger(log, told(log))

    assert later.num_charges == 2
    assert later.charge_batch() == 2
    assert later.is_spent


def test_what_is_quickly_told_is_never_below_what_is_spent(log):
    ledger = open_ledger(log, epsilon=50.0)

    for _ in range(50):
        ledger.charge_batch()
        assert ledger.epsilon_spent <= ledger.epsilon_bound <= 50.0


@pytest.mark.parametrize("changed", [{"rows": 11}, {"epsilon": 4.0}, {"sampling": "order"}])
def test_a_session_with_other_terms_is_refused(log, changed):
    open_ledger(log, sampling="poisson").charge_batch()

    with pytest.raises(ConfigError, match="earlier steps of this run were charged for"):
        open_ledger(log, told(log), **{"sampling": "poisson", **changed})


@pytest.mark.parametrize(
    "lines",
    [
        [(CHARGED, {"number": 0})],
        [(TERMS, {}), (CHARGED, {"number": 1})],
        [(TERMS, {}), (CHARGED, {"number": 0}), (CHARGED, {"number": 0})],
        [(TERMS, {}), (CHARGED, {})],
        [(TERMS, {}), (TERMS, {})],
    ],
)
def test_charges_that_do_not_follow_each_other_are_refused(lines):
    past = PastCharges()

    with pytest.raises(AuditLogError):
        for kind, body in lines:
            past.read_entry(kind, body)


def test_a_charge_that_was_cut_out_breaks_the_log(log, tmp_path):
    ledger = open_ledger(log)
    ledger.charge_batch()
    ledger.charge_batch()
    path = tmp_path / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], *lines[2:]]))

    with pytest.raises(AuditLogError):
        verify_log(path, IDENTITY.public, run="run")
