"""What was audited in one session tells nothing about the next one, though the key and the steps are the same."""

import pytest

from phalanx.pipeline import AuditDraw, GuardConfig
from phalanx.pipeline.protocol.messages import AuditReport
from phalanx.testing import Actor, rewrite_only, tampering, tiny_run

STEPS = 4
RUN = tiny_run(guard=GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0, screen=False, gradient_screen=False))


def draw(nonce):
    return AuditDraw.from_guard(b"k" * 32, nonce * 32, RUN.guard)


def liar_who_avoids(audited):
    """Lies about every forward message of stage 1 that was not audited in the session that it knows."""

    def tamper(direction, step, microbatch, tensor):
        return tensor if direction == "backward" or (step, microbatch) in audited else -tensor

    return Actor(tampering(tamper))


@pytest.fixture
def audited(make_company):
    """What the shadow of stage 1 was asked to audit in the first session, as it remembers it."""
    seen = set()

    def remember(outgoing, report):
        if report.stage == 1:
            seen.add((report.step, report.microbatch))
        return [outgoing]

    company = make_company(RUN, {2: Actor(rewrite=rewrite_only(AuditReport, remember))}, draw(b"1"))
    assert company.engine.stage_shadows[1] == "worker-2"
    company.run(STEPS)
    assert len(seen) == STEPS
    return seen


def test_who_knows_the_draws_of_the_last_session_is_met_in_the_next_one(make_company, audited):
    company = make_company(RUN, {1: liar_who_avoids(audited)}, draw(b"2"))

    company.run(STEPS)

    assert [(verdict.party, verdict.offence) for verdict in company.verdicts] == [("worker-1", "message")]


@pytest.mark.slow
def test_who_knows_the_draws_wins_where_a_session_repeats_them(make_company, honest_digest, audited):
    company = make_company(RUN, {1: liar_who_avoids(audited)}, draw(b"1"))

    company.run(STEPS)

    assert (company.verdicts, company.event_bodies("alarm")) == ([], [])
    assert company.weights_digest() != honest_digest(RUN, STEPS)


@pytest.mark.slow
def test_draws_are_in_no_bit_of_an_honest_run(make_company, honest_digest):
    found = []
    for nonce in (b"1", b"2"):
        company = make_company(RUN, draw=draw(nonce))
        company.run(STEPS)
        found.append(company.weights_digest())

    assert found == [honest_digest(RUN, STEPS)] * 2


def test_a_company_that_is_given_no_draws_has_a_nonce_of_its_own(make_company):
    assert make_company(RUN).draw.nonce != make_company(RUN).draw.nonce
