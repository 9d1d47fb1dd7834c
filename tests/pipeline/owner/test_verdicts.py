"""No party is evicted on evidence that does not hold, never the owner; each answers for its own signature."""

import pytest

from phalanx.pipeline import OWNER, GuardConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.messages import AuditReport, FetchReply
from phalanx.security.crypto import digest_hex
from phalanx.testing import Actor, tiny_run
from phalanx.testing.actor import OutgoingMessage

FULL = GuardConfig(audit_rate=1.0, step_audit_rate=0.0, owner_audit_rate=0.0, screen=False)
MIXED = FULL.model_copy(update={"classes": "mixed"})
ZEROS = bytes(2 * 8 * 16 * 4)


def find(company, *judgements):
    """Have the owner come to these judgements in the next step."""
    facts = company.engine._facts
    facts.proved += [facts.make_judgement(*found[:-1], "made up", accuser=found[-1]) for found in judgements]


@pytest.mark.quick_cases("message")
@pytest.mark.parametrize(
    "offence",
    [
        "equivocation",
        "message",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("forgery", "shape", "accusation", "gradient")),
    ],
)
def test_what_the_offline_judge_does_not_accept_evicts_nobody(make_company, honest_digest, offence):
    company = make_company(tiny_run(guard=FULL))
    company.run(1)
    find(company, (offence, "worker-1", 1, "worker-2"))

    company.run(1)

    (refused,) = company.event_bodies("verdict_refused")
    assert (refused["party"], refused["accuser"], refused["offence"]) == ("worker-1", "worker-2", offence)
    assert refused["why"]
    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])
    assert company.weights_digest() == honest_digest(tiny_run(guard=FULL), 2)
    # what was refused is kept apart from what holds
    assert list((company.run_dir / "evidence").glob("*.json")) == []
    assert (company.run_dir / str(refused["evidence"])).exists()


def test_who_is_found_wrong_twice_without_evidence_is_replaced_without_blame_and_not_its_accuser(
    make_company, honest_digest
):
    company = make_company(tiny_run(guard=FULL))
    company.run(1)
    for _ in range(2):
        find(company, ("equivocation", "worker-1", 1, "worker-2"))
        company.run(1)

    assert (company.verdicts, company.evicted, company.lost) == ([], [], ["worker-1"])
    assert "worker-2" in company.engine.stage_holders.values()
    assert company.weights_digest() == honest_digest(tiny_run(guard=FULL), 3)


@pytest.mark.parametrize(
    "offence",
    [
        "state",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("transfer", "collusion", "gradient")),
    ],
)
def test_the_owner_is_never_a_verdicts_party(make_company, honest_digest, offence):
    # offences that rest on the owner's own word, so that no signature would be missing
    company = make_company(tiny_run(guard=FULL))
    company.run(1)
    find(company, (offence, OWNER, 1, "worker-2"))

    company.run(2)

    (refused,) = company.event_bodies("verdict_refused")
    assert (refused["party"], refused["evidence"]) == (OWNER, None)
    assert (company.verdicts, company.evicted, company.lost) == ([], [], [])
    assert company.weights_digest() == honest_digest(tiny_run(guard=FULL), 3)


def drifting(by):
    """A stage with weights that go another way at each update, under the label of another numeric class."""

    def wrap(copy, held):
        if held:
            honest = copy.apply_update

            def apply(step, gradients, clip):
                honest(step, {name: by * gradient for name, gradient in gradients.items()}, clip)

            copy.apply_update = apply
        return copy

    return Actor(wrap, numeric_class="another build")


@pytest.mark.quick_cases("the?owner?shadows")
@pytest.mark.parametrize("stages", [3, 4], ids=["the owner shadows", "a worker shadows"])
def test_a_shadow_is_not_convicted_of_transfer_by_the_digest_that_a_liar_signed(make_company, stages):
    run = tiny_run(stages, guard=MIXED)
    company = make_company(run, {1: drifting(-1.0)})
    shadow = company.engine.stage_shadows[1]
    assert shadow == (OWNER if stages == 3 else "worker-2")

    company.run(3)

    assert "transfer" not in [verdict.offence for verdict in company.verdicts]
    assert {verdict.party for verdict in company.verdicts} <= {"worker-1"}
    assert (set(company.evicted) <= {"worker-1"}, company.event_bodies("verdict_refused")) == (True, [])


def test_two_honest_parties_of_two_classes_come_through_a_dispute(make_company):
    # bits of the messages differ in every step, and once the accuser claims something else
    def accuse(outgoing):
        message = outgoing.message
        if isinstance(message, AuditReport) and (message.step, message.stage) == (2, 1):
            return [outgoing.with_fields({"digests": {**message.digests, "forward": digest_hex(ZEROS)}})]
        if isinstance(message, FetchReply) and message.claim and message.direction == "forward":
            return [OutgoingMessage(outgoing.receiver, message, ZEROS)]
        return [outgoing]

    run = tiny_run(guard=MIXED)
    company = make_company(
        run,
        {1: Actor(numeric_class="another build"), 2: Actor(rewrite=accuse, numeric_class="a third build")},
    )
    company.run(3)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence) == ("worker-2", "accusation")
    facts = explain_evidence(company.run_dir / str(verdict.evidence))
    assert str(facts["weights"]) == "their digest was signed by worker-1 and worker-2"
