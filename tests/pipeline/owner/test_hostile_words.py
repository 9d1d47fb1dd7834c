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
from phalanx.testing import Actor, Letter, only, tampering, tiny_run

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


@pytest.mark.parametrize("signed", NONSENSE, ids=IDS)
def test_an_auditor_that_shows_nonsense_as_its_input_is_named(make_company, honest_digest, signed):
    show = only(AuditReport, lambda letter, report: [letter.saying({"inputs": (signed,)})])

    verdict = ends_well(make_company, honest_digest, {2: Actor(rewrite=show)}, "worker-2")

    assert verdict.offence == "forgery"


@pytest.mark.parametrize("signed", NONSENSE, ids=IDS)
def test_a_stage_that_commits_to_nonsense_is_named(make_company, honest_digest, signed):
    show = only(Commit, lambda letter, commit: [letter.saying({"received": (signed, *commit.received[1:])})])
    run = tiny_run(pipeline=PipelineConfig(stages=4, step_timeout_s=4.0))

    verdict = ends_well(make_company, honest_digest, {1: Actor(rewrite=show)}, "worker-1", run)

    assert verdict.offence == "forgery"


@pytest.mark.parametrize("signed", NONSENSE, ids=IDS)
def test_a_shadow_that_shows_nonsense_as_parts_is_named(make_company, honest_digest, signed):
    show = only(GradientHeld, lambda letter, held: [letter.saying({"gradient": "1" * 64, "parts": (signed,)})])

    verdict = ends_well(make_company, honest_digest, {2: Actor(rewrite=show)}, "worker-2")

    assert verdict.offence == "gradient"


@pytest.mark.parametrize("numeric_class", [None, "another build"])
def test_an_accuser_whose_claim_is_no_tensor_is_named(make_company, honest_digest, numeric_class):
    def rewrite(letter):
        message = letter.message
        if isinstance(message, AuditReport):
            return [letter.saying({"digests": {**message.digests, "forward": digest_hex(b"short")}})]
        if isinstance(message, FetchReply) and message.claim:
            return [Letter(letter.receiver, message, b"short")]
        return [letter]

    actor = Actor(rewrite=rewrite, numeric_class=numeric_class)

    verdict = ends_well(make_company, honest_digest, {2: actor}, "worker-2", mixed_run())

    assert verdict.offence == "accusation"


def test_a_stage_of_another_class_that_answers_with_no_tensor_is_named(make_company, honest_digest):
    def rewrite(letter):
        if isinstance(letter.message, FetchReply) and letter.message.source == 1:
            return [Letter(letter.receiver, letter.message, b"short")]
        return [letter]

    lie = tampering(lambda direction, step, microbatch, tensor: -tensor if direction == "forward" else tensor)
    actor = Actor(lie, rewrite, numeric_class="another build")

    verdict = ends_well(make_company, honest_digest, {1: actor}, "worker-1", mixed_run())

    assert (verdict.offence, verdict.stage) == ("message", 1)


@pytest.mark.parametrize("digests", [{}, {"forward": "1" * 64}])
def test_an_auditor_that_did_not_do_all_its_work_does_not_pass(make_company, honest_digest, digests):
    # a lie in the backward messages would go through with such an auditor
    def skip(letter, report):
        kept = {direction: digest for direction, digest in report.digests.items() if direction in digests}
        return [letter.saying({"digests": kept})]

    verdict = ends_well(make_company, honest_digest, {2: Actor(rewrite=only(AuditReport, skip))}, "worker-2")

    assert (verdict.offence, verdict.party) == ("forgery", "worker-2")


def test_a_liar_that_hides_its_inputs_before_it_has_committed_is_named(make_company, honest_digest):
    # the screen finds NaN, and the stage does not say what it computed it from
    def nan(direction, step, microbatch, tensor):
        return tensor * math.nan if (direction, step, microbatch) == ("forward", 1, 1) else tensor

    def hide(letter, fetched):
        return [] if letter.receiver == "owner" and fetched.source == 0 else [letter]

    company = make_company(tiny_run(), {1: Actor(tampering(nan), only(FetchReply, hide))})
    company.engine._requests.timeout_s = 1.0

    company.run(2)

    assert company.evicted == ["worker-1"]
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


def test_a_liar_that_answers_nobody_is_named_by_what_others_have(make_company, honest_digest):
    lie = tampering(lambda direction, step, microbatch, tensor: -tensor if direction == "forward" else tensor)
    company = make_company(tiny_run(), {1: Actor(lie, only(FetchReply, lambda letter, fetched: []))})
    company.engine._requests.timeout_s = 1.0
    started = company.clock.now()

    company.run(1)

    assert company.evicted == ["worker-1"]
    assert company.clock.now() - started < 20
    assert company.weights_digest() == honest_digest(tiny_run(), 1)


def test_a_stage_number_of_thousands_of_digits_convicts_who_signed_it(make_company, honest_digest):
    def add(letter, applied):
        state = next(iter(applied.states.values()))
        return [letter, letter.saying({"states": {"9" * 5000: state}})]

    company = make_company(tiny_run(), {1: Actor(rewrite=only(UpdateReport, add))})

    company.run(2)

    (verdict,) = company.verdicts
    assert (verdict.party, verdict.offence, verdict.accuser) == ("worker-1", "forgery", "owner")
    assert len(verdict.reason) < 500
    assert company.weights_digest() == honest_digest(tiny_run(), 2)


def test_a_message_of_the_next_step_that_turns_out_wrong_ends_nobody(make_company, honest_digest):
    # it is kept until that step begins, and is looked at then
    def early(letter, commit):
        stray = Bulk(epoch=0, step=commit.step + 1, purpose="gradient", stage=33, offset=0, total=4)
        return [Letter("worker-2", stray, b"1234"), letter]

    company = make_company(tiny_run(), {1: Actor(rewrite=only(Commit, early))})

    company.run(3)

    assert (company.lost, company.verdicts) == ([], [])
    assert company.weights_digest() == honest_digest(tiny_run(), 3)
