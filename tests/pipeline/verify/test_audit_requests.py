"""What is audited, and by which party: drawn when every stage has committed, and asked for once."""

import pytest
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world

from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.protocol.messages import ScreenHit
from phalanx.pipeline.tolerance.screen import DOUBTS_AT_ONCE
from phalanx.pipeline.verify.audits import BOTH, AuditRequests
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import StepLedger

ALL = (0, 1, 2, 3)


class Office:
    """Requests for audits of stage 1 and 2, with every stage committed, and what was posted."""

    def __init__(self, model_cache, rate=0.25, guard=None, **rates):
        self.world = make_world(model_cache, **(guard or {}))
        self.facts = self.world.facts
        self.world.whole_step()
        self.facts.agreed_states[2] = self.world.state
        self.posted = []
        self.draw = AuditDraw(b"k" * 32, b"n" * 32, rate, **rates)
        self.requests = AuditRequests(self.facts, self._post, self.draw)

    def _post(self, party, message, payload):
        self.posted.append((party, message))

    def asked(self):
        """(auditor, stage, microbatches, whole step) of every request, in order."""
        return [(party, audit.stage, audit.microbatches, audit.weights) for party, audit in self.posted]


@pytest.fixture
def office(model_cache):
    return Office(model_cache)


def drawn_of(office, stage):
    return office.draw.draw_microbatches(step=STEP, epoch=EPOCH, stage=stage, num_microbatches=4)


def test_every_stage_in_other_hands_is_audited_at_the_rate_by_its_shadow(office):
    office.requests.draw_audits(())

    assert office.asked() == [(SHADOW, 1, drawn_of(office, 1), False), (HOLDER, 2, drawn_of(office, 2), False)]
    ledger = office.facts.ledger
    assert ledger.awaited_audits == {(1, m, SHADOW) for m in drawn_of(office, 1)} | {
        (2, m, HOLDER) for m in drawn_of(office, 2)
    }
    assert (ledger.audits_drawn, ledger.num_audits, ledger.may_lag) == (True, 2, False)
    assert all(audit.directions == BOTH and not audit.urgent for _, audit in office.posted)


def test_a_stage_that_leans_is_audited_in_full(office):
    office.requests.draw_audits((2,))

    assert office.asked() == [(SHADOW, 1, drawn_of(office, 1), False), (HOLDER, 2, ALL, False)]


def test_a_step_that_is_audited_as_a_whole_has_its_weight_gradient_recomputed(model_cache):
    office = Office(model_cache, step_rate=1.0)

    office.requests.draw_audits(())

    assert office.asked() == [(SHADOW, 1, ALL, True), (HOLDER, 2, ALL, True)]
    assert office.facts.ledger.awaited_step_audits == {(1, SHADOW), (2, HOLDER)}


def test_in_lockstep_everything_is_recomputed_and_no_gradient_asked_for(model_cache):
    office = Office(model_cache, guard={"shadow": "lockstep"}, step_rate=1.0)

    office.requests.draw_audits(())

    assert office.asked() == [(SHADOW, 1, ALL, False), (HOLDER, 2, ALL, False)]
    assert office.facts.ledger.awaited_step_audits == set()


def test_the_owner_redoes_what_the_coin_says(model_cache):
    office = Office(model_cache, owner_rate=1.0)
    office.requests.draw_audits(())
    assert office.facts.ledger.owners_audits == {1, 2}

    office = Office(model_cache, owner_rate=0.0)
    office.requests.draw_audits(())
    assert office.facts.ledger.owners_audits == set()


def test_what_the_owner_serves_is_not_audited(office):
    office.facts.assignment = Assignment({0: OWNER, 1: HOLDER, 2: OWNER, 3: OWNER}, {1: SHADOW, 2: HOLDER})

    office.requests.draw_audits(())

    assert [stage for _, stage, _, _ in office.asked()] == [1]


# --- a lagging step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lag", "rates", "may"),
    [(1, {}, True), (0, {}, False), (1, {"owner_rate": 1.0}, False)],
    ids=["lag", "no", "owner"],
)
def test_a_step_may_lag_where_shadows_alone_audit_it(model_cache, lag, rates, may):
    office = Office(model_cache, guard={"commit_lag": lag}, **rates)

    office.requests.draw_audits(())

    assert office.facts.ledger.may_lag is may


# --- at once ---------------------------------------------------------------------------------------------------------


def hit(direction):
    return ScreenHit(epoch=EPOCH, step=STEP, microbatch=2, direction=direction, source=STAGE, reason="its norm is odd")


@pytest.mark.parametrize(("direction", "directions"), [("forward", ("forward",)), ("backward", BOTH)])
def test_a_message_that_looks_odd_is_recomputed_alone_and_at_once(office, direction, directions):
    office.requests.order_urgent_audit(hit(direction))

    ((auditor, audit),) = office.posted
    assert (auditor, audit.microbatches, audit.directions, audit.urgent) == (SHADOW, (2,), directions, True)


@pytest.mark.parametrize(("direction", "receiver"), [("forward", SHADOW), ("backward", OWNER)])
def test_what_is_cleared_goes_to_its_receiver(office, direction, receiver):
    office.requests.release_screened(hit(direction))

    ((party, release),) = office.posted
    assert (party, release.kind, release.tensor_place) == (receiver, "release", hit(direction).tensor_place)


# --- doubts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def screening(model_cache):
    return Office(model_cache, guard={"gradient_screen": True})


def doubt(office, stage=STAGE, auditor=SHADOW, ledger=None):
    office.requests.audit_whole_step(ledger or office.facts.ledger, stage, auditor, "size")


def test_a_doubt_has_its_author_recompute_the_whole_step_once(screening):
    doubt(screening)
    doubt(screening)

    assert screening.asked() == [(SHADOW, 1, ALL, True)]
    ledger = screening.facts.ledger
    assert (ledger.doubted, ledger.num_audits) == ({1: "size"}, 4)
    assert ledger.awaited_step_audits == {(1, SHADOW)}
    assert [kind for kind, _ in screening.world.events] == ["gradient_doubted"]


def test_what_was_reported_before_a_doubt_is_to_be_reported_again(screening):
    ledger = screening.facts.ledger
    ledger.awaited_audits.add((1, 0, SHADOW))
    ledger.reports[(1, 0, SHADOW)] = screening.world.report()

    doubt(screening)

    assert ledger.unreported_audits == [(1, m, SHADOW) for m in ALL]


def asked_already(office):
    office.facts.ledger.awaited_step_audits.add((1, SHADOW))
    doubt(office)


def by_another(office):
    doubt(office, auditor=HOLDER)


@pytest.mark.parametrize("how", [asked_already, by_another])
def test_a_doubt_about_a_step_that_is_redone_anyway_or_of_another_party_is_not_followed(screening, how):
    how(screening)

    assert (screening.posted, screening.facts.ledger.doubted) == ([], {})


def test_a_doubt_where_no_gradient_is_screened_is_not_followed(model_cache):
    office = Office(model_cache, guard={"gradient_screen": False})

    doubt(office)

    assert office.posted == []


@pytest.mark.parametrize("lag", [0, 1])
def test_a_shadow_that_doubts_all_the_time_is_told_to_go_on(model_cache, lag):
    office = Office(model_cache, guard={"gradient_screen": True, "commit_lag": lag})
    for step in range(DOUBTS_AT_ONCE + 2):
        doubt(office, ledger=StepLedger(step, EPOCH))

    followed = [audit for _, audit in office.posted if audit.microbatches]
    assert len(followed) == DOUBTS_AT_ONCE
    # it stays before its update until it is told, where verdicts lag
    assert len(office.posted) - len(followed) == 2 * lag
    assert [kind for kind, _ in office.world.events].count("doubts_not_followed") == 1
