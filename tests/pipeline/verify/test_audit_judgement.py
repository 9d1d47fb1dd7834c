"""The judgement of audit reports by itself: a report is compared with what was signed, and no more believed."""

import pytest
import torch
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, digest_of, make_world

from phalanx.pipeline.protocol.messages import ScreenHit
from phalanx.pipeline.tolerance.drift import DriftWatch
from phalanx.pipeline.verify.audit_judgement import AuditJudgement
from phalanx.pipeline.verify.referee import Referee

BOTH = ("forward", "backward")


@pytest.fixture
def world(model_cache):
    return make_world(model_cache)


def judge_of(world):
    return AuditJudgement(world.facts, Referee(world.plan, world.facts.bits_decide), DriftWatch(b"k" * 32))


def weighed(world, report, judge=None):
    known = world.facts.ledger.messages
    return world.judge_page((judge or judge_of(world)).weigh_report(SHADOW, report, known, BOTH))


def test_an_honest_report_needs_nothing_and_accuses_nobody(world):
    assert weighed(world, world.report()) is None
    assert world.asked == []
    assert world.events == []


@pytest.mark.parametrize("direction", BOTH)
def test_a_report_that_differs_names_the_stage_that_lied(world, direction):
    world.lie(-world.truth(direction), direction)

    judgement = weighed(world, world.report())

    verdict = judgement.verdict
    assert (verdict.party, verdict.offence, verdict.direction, verdict.accuser) == (
        HOLDER,
        "message",
        direction,
        SHADOW,
    )
    assert judgement.headers["output"] == world.facts.ledger.messages[(STAGE, direction, 0)].header
    assert [kind for kind, _ in world.events] == ["alarm"]


def test_a_report_that_differs_from_an_honest_stage_names_the_auditor(world):
    judgement = weighed(world, world.report(forward=torch.zeros(2, 8, 16)))

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "accusation")


@pytest.mark.parametrize("left", [{"forward": "aa" * 32}, {}], ids=["one way", "nothing"])
def test_a_report_on_less_than_was_asked_for_names_its_auditor(world, left):
    report = world.report().model_copy(update={"digests": left})

    judgement = weighed(world, report)

    assert (judgement.verdict.party, judgement.verdict.offence, judgement.verdict.microbatch) == (
        SHADOW,
        "forgery",
        0,
    )
    assert world.asked == []


STRAY = {
    "another session": {"run": "run-0"},
    "an earlier epoch": {"epoch": EPOCH - 1},
    "an earlier step": {"step": STEP + 1},
    "another microbatch": {"microbatch": 2},
    "another stage": {"target": 2},
    "another receiver": {"receiver": OWNER},
}


@pytest.mark.parametrize("changes", STRAY.values(), ids=STRAY)
def test_an_input_that_no_neighbour_sent_here_and_now_names_the_auditor_that_shows_it(world, changes):
    x = world.tensors[(HOLDER, 0, "forward", 0, False)]
    stray = world.header((0, "forward", 0), x, OWNER, HOLDER, **changes)

    judgement = weighed(world, world.report(inputs=(stray,)))

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "forgery")
    assert judgement.headers == {"input": stray}
    assert world.asked == []


def test_an_input_whose_signature_is_another_ones_names_the_auditor(world):
    genuine = world.facts.ledger.messages[(0, "forward", 0)].header
    forged = genuine.model_copy(update={"signature": "00" * 64})

    judgement = weighed(world, world.report(inputs=(forged,)))

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "forgery")


def test_a_sender_that_signed_two_tensors_for_one_message_is_named_by_both(world):
    gradient = torch.ones(2, 8, 16)
    # the other one has gone to the auditor, and its sender is the neighbour that shadows this stage
    told = world.header((2, "backward", 0), gradient, SHADOW, HOLDER)

    judgement = weighed(world, world.report(inputs=(told,)))

    verdict = judgement.verdict
    assert (verdict.party, verdict.offence, verdict.stage) == (SHADOW, "equivocation", 2)
    known = world.facts.ledger.messages[(2, "backward", 0)].header
    assert judgement.headers == {"told_stage": known, "told_auditor": told}


def test_whoever_keeps_back_what_it_sent_to_a_stage_that_does_not_show_it_answers_for_it(world):
    world.lie(-world.truth("backward"), "backward")
    known = {key: said for key, said in world.facts.ledger.messages.items() if key[0] == STAGE}
    report = world.report()
    for party in (SHADOW, HOLDER):
        world.tensors[(party, 2, "backward", 0, False)] = None

    judgement = world.judge_page(judge_of(world).weigh_report(SHADOW, report, known, BOTH))

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "transfer")


@pytest.mark.parametrize("left_out", [0, 1])
def test_an_auditor_that_shows_no_input_beside_a_stage_that_shows_none_is_to_go(world, left_out):
    """Attackers: a stage and its auditor in league, who would leave the referee with nothing to recompute from."""
    known = {key: said for key, said in world.facts.ledger.messages.items() if key[0] == STAGE}
    shown = list(world.report().inputs)
    del shown[left_out]

    report = world.report(inputs=tuple(shown))
    judgement = world.judge_page(judge_of(world).weigh_report(SHADOW, report, known, BOTH))

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "transfer")


# --- other numeric classes -------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(model_cache):
    world = make_world(model_cache, classes="mixed")
    world.facts.classes = {OWNER: "a", HOLDER: "a", SHADOW: "b"}
    return world


def test_across_classes_rounding_is_no_alarm(mixed):
    report = mixed.report(forward=mixed.truth("forward") * (1 + 1e-6))

    assert weighed(mixed, report) is None
    # both tensors were compared: the stage's and the auditor's own
    assert [(need.party, need.request.claim) for need in mixed.asked] == [(HOLDER, False), (SHADOW, True)]


def test_across_classes_more_than_rounding_names_the_one_that_is_off(mixed):
    report = mixed.report(forward=mixed.truth("forward") * 1.01)

    assert weighed(mixed, report).verdict.party == SHADOW


@pytest.mark.parametrize("brought", [None, memoryview(b""), memoryview(b"12345")], ids=["nothing", "empty", "short"])
def test_across_classes_an_accuser_that_does_not_bring_its_claim_is_to_be_replaced(mixed, brought):
    report = mixed.report(forward=mixed.truth("forward") * (1 + 1e-6))
    mixed.tensors[(SHADOW, STAGE, "forward", 0, True)] = brought

    judgement = weighed(mixed, report)

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "transfer")


# what is brought counts under the digest that was signed, whichever of the two sides it suits


def test_across_classes_a_liar_that_brings_the_honest_tensor_for_its_lie_is_not_close(mixed):
    honest = mixed.truth("forward")
    mixed.lie(-honest)
    mixed.tensors[(HOLDER, STAGE, "forward", 0, False)] = honest

    judgement = weighed(mixed, mixed.report())

    # the receiver has the bytes that were signed
    assert (judgement.verdict.party, judgement.verdict.offence) == (HOLDER, "message")


def test_across_classes_a_liar_and_its_receiver_that_bring_the_honest_tensor_do_not_pass(mixed):
    honest = mixed.truth("forward")
    mixed.lie(-honest)
    for party in (HOLDER, SHADOW):
        mixed.tensors[(party, STAGE, "forward", 0, False)] = honest

    judgement = weighed(mixed, mixed.report())

    assert (judgement.verdict.party, judgement.verdict.offence) == (HOLDER, "transfer")


def test_across_classes_an_auditor_that_brings_the_stages_tensor_for_its_own_claim_is_not_close(mixed):
    report = mixed.report(forward=-mixed.truth("forward"))
    mixed.tensors[(SHADOW, STAGE, "forward", 0, True)] = mixed.truth("forward")

    judgement = weighed(mixed, report)

    assert (judgement.verdict.party, judgement.verdict.offence) == (SHADOW, "transfer")


# --- a message that looked odd ---------------------------------------------------------------------------------------


def hit(direction="forward"):
    return ScreenHit(epoch=EPOCH, step=STEP, microbatch=0, direction=direction, source=STAGE, reason="its norm is odd")


def test_what_was_signed_about_an_odd_message_is_asked_for_before_it_is_committed_to(world):
    known = world.judge_page(judge_of(world).fetch_early_commitments(hit("backward")))

    assert set(known) == {(STAGE, "backward", 0), (0, "forward", 0), (2, "backward", 0)}
    assert known[(0, "forward", 0)].shown_by == HOLDER
    assert known[(STAGE, "backward", 0)].digest == digest_of(world.truth("backward"))


def test_of_an_odd_message_a_header_of_another_step_or_party_counts_as_nothing(world):
    x = world.tensors[(HOLDER, 0, "forward", 0, False)]
    old = world.header((0, "forward", 0), x, OWNER, HOLDER, epoch=EPOCH - 1)
    foreign = world.header((STAGE, "forward", 0), world.truth("forward"), SHADOW, HOLDER)
    world.evidence = {(HOLDER, 0, "forward", 0): old, (SHADOW, STAGE, "forward", 0): foreign}

    assert world.judge_page(judge_of(world).fetch_early_commitments(hit())) == {}
