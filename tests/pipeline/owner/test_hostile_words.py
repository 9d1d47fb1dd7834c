"""Whatever a party signs, the owner answers with a verdict or a refusal, never by ending the run."""

import math

import pytest

from phalanx.pipeline import GuardConfig, PipelineConfig
from phalanx.pipeline.protocol.messages import (
    AuditReport,
    Bulk,
    Commit,
    FetchReply,
    GradientHeld,
    PassedOnHeader,
    UpdateReport,
)
from phalanx.security.crypto import digest_hex
from phalanx.testing import Actor, OutgoingMessage, rewrite_only, tampering, tiny_run

NONSENSE = [
    PassedOnHeader(header="no JSON", signature="zz"),
    PassedOnHeader(header="[]", signature="00" * 64),
    PassedOnHeader(header='{"body":[]}', signature="00" * 64),
    PassedOnHeader(header='{"body":{"source":Infinity,"direction":"forward","microbatch":0}}', signature="00" * 64),
    PassedOnHeader(header='{"body":{"source":0,"direction":["forward"],"microbatch":0}}', signature="00" * 64),
    PassedOnHeader(header="[" * 100_000, signature="00" * 64),
]
IDS = ["no JSON", "a list", "a list as body", "infinity", "unhashable", "deep"]


def ends_well(make_company, honest_digest, actors, guilty, run=None):
    run = run or tiny_run()
    company = make_company(run, actors)
    company.run(2)
    assert company.evicted == [guilty]
    assert company.weights_digest() == honest_digest(run, 2)
    return company.verdicts[0]


def mixed_run():
    return tiny_run(guard=GuardConfig(step_audit_rate=0.0, owner_audit_rate=0.0, classes="mixed"))


SOME_NONSENSE = [*NONSENSE[:2], *(pytest.param(one, marks=pytest.mark.slow) for one in NONSENSE[2:])]
"""The reader is one for all messages: each kind is shown to it once, in an auditor's word."""


@pytest.mark.quick_cases("deep")
@pytest.mark.parametrize("signed", [*NONSENSE[:3], *SOME_NONSENSE[3:5], NONSENSE[5]], ids=IDS)
def test_an_auditor_that_shows_nonsense_as_its_input_is_named(make_company, honest_digest, signed):
    show = rewrite_only(AuditReport, lambda outgoing, report: [outgoing.with_fields({"inputs": (signed,)})])

    verdict = ends_well(make_company, honest_digest, {2: Actor(rewrite=show)}, "worker-2")

    assert verdict.offence == "forgery"


@pytest.mark.quick_cases("no?JSON")
@pytest.mark.parametrize("signed", SOME_NONSENSE, ids=IDS)
def test_a_stage_that_commits_to_nonsense_is_named(make_company, honest_digest, signed):
    show = rewrite_only(
        Commit, lambda outgoing, commit: [outgoing.with_fields({"received": (signed, *commit.received[1:])})]
    )
    run = tiny_run(pipeline=PipelineConfig(stages=4, step_timeout_s=4.0))

    verdict = ends_well(make_company, honest_digest, {1: Actor(rewrite=show)}, "worker-1", run)

    assert verdict.offence == "forgery"


@pytest.mark.quick_cases("a?list")
@pytest.mark.parametrize("signed", SOME_NONSENSE, ids=IDS)
def test_a_shadow_that_shows_nonsense_as_parts_is_named(make_company, honest_digest, signed):
    show = rewrite_only(
        GradientHeld, lambda outgoing, held: [outgoing.with_fields({"gradient": "1" * 64, "parts": (signed,)})]
    )

    verdict = ends_well(make_company, honest_digest, {2: Actor(rewrite=show)}, "worker-2")

    assert verdict.offence == "gradient"


@pytest.mark.quick_cases("another?build")
@pytest.mark.parametrize("numeric_class", [None, "another build"])
def test_an_accuser_whose_claim_is_no_tensor_is_replaced_and_the_stage_stays(
    make_company, honest_digest, numeric_class
):
    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, AuditReport):
            return [outgoing.with_fields({"digests": {**message.digests, "forward": digest_hex(b"short")}})]
        if isinstance(message, FetchReply) and message.claim:
            return [OutgoingMessage(outgoing.receiver, message, b"short")]
        return [outgoing]

    company = make_company(mixed_run(), {2: Actor(rewrite=rewrite, numeric_class=numeric_class)})

    company.run(2)

    # across classes bytes decide, and it withholds those of its own claim
    assert (company.verdicts, company.evicted, company.lost) == ([], [], ["worker-2"])
    assert {body["offence"] for body in company.event_bodies("verdict_refused")} == {"transfer"}
    assert "worker-1" in company.engine.stage_holders.values()
    assert company.weights_digest() == honest_digest(mixed_run(), 2)


def test_a_stage_of_another_class_that_answers_with_no_tensor_is_named(make_company, honest_digest):
    def rewrite(outgoing):
        if isinstance(outgoing.message, FetchReply) and outgoing.message.source == 1:
            return [OutgoingMessage(outgoing.receiver, outgoing.message, b"short")]
        return [outgoing]

    lie = tampering(lambda direction, step, microbatch, tensor: -tensor if direction == "forward" else tensor)
    actor = Actor(lie, rewrite, numeric_class="another build")

    verdict = ends_well(make_company, honest_digest, {1: actor}, "worker-1", mixed_run())

    assert (verdict.offence, verdict.stage) == ("message", 1)


@pytest.mark.quick_cases("digests1")
@pytest.mark.parametrize("digests", [{}, {"forward": "1" * 64}])
def test_an_auditor_that_did_not_do_all_its_work_does_not_pass(make_company, honest_digest, digests):
    # a lie in the backward messages would go through with such an auditor
    def skip(outgoing, report):
        kept = {direction: digest for direction, digest in report.digests.items() if direction in digests}
        return [outgoing.with_fields({"digests": kept})]

    verdict = ends_well(make_company, honest_digest, {2: Actor(rewrite=rewrite_only(AuditReport, skip))}, "worker-2")

    assert (verdict.offence, verdict.party) == ("forgery", "worker-2")


def test_a_liar_that_hides_its_inputs_before_it_has_committed_is_named(make_company, honest_digest):
    # the screen finds NaN, and the stage does not say what it computed it from
    def nan(direction, step, microbatch, tensor):
        return tensor * math.nan if (direction, step, microbatch) == ("forward", 1, 1) else tensor

    def hide(outgoing, fetched):
        return [] if outgoing.receiver == "owner" and fetched.source == 0 else [outgoing]

    company = make_company(tiny_run(), {1: Actor(tampering(nan), rewrite_only(FetchReply, hide))})
    company.engine._context.requests.timeout_s = 1.0

    company.run(2)

    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


def test_a_liar_that_answers_nobody_is_named_by_what_others_have(make_company, honest_digest):
    lie = tampering(lambda direction, step, microbatch, tensor: -tensor if direction == "forward" else tensor)
    company = make_company(tiny_run(), {1: Actor(lie, rewrite_only(FetchReply, lambda outgoing, fetched: []))})
    company.engine._context.requests.timeout_s = 1.0
    started = company.clock.awake_seconds()

    company.run(1)

    assert company.evicted == ["worker-1"]
    assert company.clock.awake_seconds() - started < 20
    assert company.weights_digest() == honest_digest(tiny_run(), 1)


def test_a_stage_number_of_thousands_of_digits_convicts_who_signed_it(make_company, honest_digest):
    def add(outgoing, applied):
        state = next(iter(applied.states.values()))
        return [outgoing, outgoing.with_fields({"states": {"9" * 5000: state}})]

    company = make_company(tiny_run(), {1: Actor(rewrite=rewrite_only(UpdateReport, add))})

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence, verdict.accuser) == ("worker-1", "forgery", "owner")
    assert len(verdict.reason) < 500
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


def test_a_message_of_the_next_step_that_turns_out_wrong_ends_nobody(make_company, honest_digest):
    # it is kept until that step begins, and is looked at then
    def early(outgoing, commit):
        stray = Bulk(epoch=0, step=commit.step + 1, purpose="gradient", stage=33, offset=0, total=4)
        return [OutgoingMessage("worker-2", stray, b"1234"), outgoing]

    company = make_company(tiny_run(), {1: Actor(rewrite=rewrite_only(Commit, early))})

    company.run(3)

    assert (company.lost, company.verdicts) == ([], [])
    assert company.weights_digest() == honest_digest(tiny_run(), 3)
