"""What parties have signed, as it is kept for evidence: by its own sender, of the last steps, and no more of it."""

import pytest
import torch
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, digest_of, make_world, received

from phalanx.pipeline.evidence.files import ComparedTensors
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import (
    AuditReport,
    Commit,
    GradientHeld,
    Ready,
    StepAudited,
    UpdateReport,
    WeightsHeld,
)
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.verify.signed_history import SignedHistory

PLACE = {"epoch": EPOCH, "step": STEP, "stage": STAGE}
GRADIENT = {"gradient": "ab" * 32, "norm_squared": 1.0}
PEM = {"worker-1": "a certificate"}


@pytest.fixture
def world(model_cache):
    return make_world(model_cache)


@pytest.fixture
def history():
    return SignedHistory()


def hear(history, message, sender):
    """The history hears a message; returns its header as evidence."""
    item = received(message, sender)
    history.hear(item)
    return to_signed(item.header)


def commit(**changes):
    return Commit(**{**PLACE, **GRADIENT, "received": (), "sent": (), **changes})


def report(microbatch=0, **changes):
    digests = {"forward": "11" * 32, "backward": "22" * 32}
    return AuditReport(
        **{**PLACE, "microbatch": microbatch, "inputs": (), "digests": digests, "urgent": False, **changes}
    )


def verdict(world, offence="message", **changes):
    found = world.facts.judgement(offence, HOLDER, STAGE, "made up", accuser=SHADOW)
    found.verdict = found.verdict.model_copy(update={"microbatch": 0, "direction": "forward", **changes})
    return found.verdict


def about(world, history, offence="message", *, auditor=SHADOW, claim=None, shown=None, **changes):
    return history.about(verdict(world, offence, **changes), HOLDER, SHADOW, auditor, claim=claim, shown=shown)


def test_what_holder_and_shadow_signed_is_found_by_the_part_that_it_plays(world, history):
    state = world.state
    said = {
        "commit": hear(history, commit(), HOLDER),
        "gradient_held": hear(history, GradientHeld(**PLACE, **GRADIENT, parts=()), SHADOW),
        "step_audited": hear(history, StepAudited(**PLACE, **GRADIENT), SHADOW),
        "report": hear(history, report(), SHADOW),
        "state_holder": hear(history, Ready(epoch=EPOCH, states={"1": state}), HOLDER),
        "state_shadow": hear(history, WeightsHeld(**PLACE, state=state, parts=()), SHADOW),
    }

    assert about(world, history) == said


def test_a_message_without_a_signature_is_not_kept(world, history):
    history.hear(ReceivedMessage(HOLDER, commit(), memoryview(b""), None))

    assert about(world, history) == {}


@pytest.mark.parametrize("sender", [SHADOW, OWNER, "worker-9"])
def test_a_commitment_of_another_party_is_not_the_holders(world, history, sender):
    hear(history, commit(), sender)

    assert about(world, history) == {}


@pytest.mark.parametrize("place", [{"step": STEP + 1}, {"stage": 2}])
def test_what_was_said_about_another_step_or_stage_is_no_evidence_here(world, history, place):
    hear(history, commit(**place), HOLDER)
    hear(history, report(**place), SHADOW)

    assert about(world, history) == {}


def test_a_state_counts_at_the_step_that_it_is_of_and_not_at_that_of_the_message(world, history):
    later = world.state.model_copy(update={"step": STEP + 1})
    costs = {"usage": {}, "bytes_sent": {}}
    said = hear(history, UpdateReport(epoch=EPOCH, step=STEP, states={"1": later}, **costs), HOLDER)

    assert about(world, history) == {}
    assert history.said("state", HOLDER, STAGE, STEP + 1) == said


def test_a_party_that_repeats_itself_takes_no_more_room_and_its_last_word_counts(world, history):
    for number in range(100):
        last = hear(history, commit(norm_squared=float(number)), HOLDER)

    assert len(history._said) == 1
    assert history.said("commit", HOLDER, STAGE, STEP) == last


def test_what_is_older_than_the_steps_that_can_be_blamed_is_let_go(history):
    for step in range(5):
        hear(history, commit(step=step), HOLDER)

    history.forget_before(4)

    kept = [step for step in range(5) if history.said("commit", HOLDER, STAGE, step) is not None]
    assert kept == [2, 3, 4]


def test_reports_are_kept_by_microbatch_and_an_urgent_one_beside_the_drawn_one(history):
    drawn = hear(history, report(3), SHADOW)
    hear(history, report(3, urgent=True), SHADOW)
    other = hear(history, report(2), SHADOW)

    assert history.said("audit_report", SHADOW, STAGE, STEP, 3) == drawn
    assert history.said("audit_report", SHADOW, STAGE, STEP, 2) == other
    assert history.said("audit_report", SHADOW, STAGE, STEP, 1) is None


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (report(), True),
        (report(1), False),
        (report(digests={"backward": "22" * 32}), False),
        (report(digests={"forward": "33" * 32, "backward": "22" * 32}), False),
    ],
    ids=["it", "another microbatch", "without that direction", "another digest"],
)
def test_of_a_disputed_tensor_the_report_that_committed_to_it_is_picked(world, history, said, found):
    hear(history, said, SHADOW)

    assert ("report" in about(world, history, claim="11" * 32)) is found


def test_a_report_of_another_party_than_the_auditor_is_not_its_report(world, history):
    hear(history, report(), "worker-9")

    assert about(world, history, claim="11" * 32) == {}


@pytest.mark.parametrize("said", [report(urgent=True), report(digests={})], ids=["urgent", "left out"])
def test_of_a_report_that_left_something_out_the_very_one_is_picked(world, history, said):
    header = hear(history, said, SHADOW)

    assert about(world, history, "forgery")["report"] == header


def test_a_whole_report_is_not_one_that_left_something_out(world, history):
    hear(history, report(), SHADOW)

    assert about(world, history, "forgery") == {}


def test_of_an_input_that_was_shown_the_report_that_shows_it_is_picked(world, history):
    inputs = [world.facts.ledger.messages[(0, "forward", m)].header for m in (0, 1)]
    hear(history, report(0, inputs=(inputs[0],)), SHADOW)
    second = hear(history, report(1, inputs=(inputs[1],)), SHADOW)

    assert about(world, history, "forgery", shown=inputs[1])["report"] == second
    assert about(world, history, "forgery", shown=world.facts.ledger.messages[(0, "forward", 2)].header) == {}


@pytest.mark.parametrize("name", ["100000", "1" * 4000, "١"])
def test_a_text_that_is_no_stages_number_is_passed_over(history, world, name):
    ready = Ready.model_construct(epoch=EPOCH, states={name: world.state})
    header = received(commit(), HOLDER).header

    history.hear(ReceivedMessage(HOLDER, ready, memoryview(b""), header))

    assert history._said.keys() <= {("state", HOLDER, 1, STEP, None)}


# --- a case ----------------------------------------------------------------------------------------------------------


def case(world, history, judgement):
    return history.case(judgement, world.facts, PEM, "an authority")


def test_a_case_holds_what_was_signed_and_what_the_judgement_itself_shows(world, history):
    committed = hear(history, commit(), HOLDER)
    judgement = world.facts.judgement("equivocation", HOLDER, STAGE, "made up", headers={"message": committed})

    found = case(world, history, judgement)

    assert found.headers == {"commit": committed, "message": committed}
    assert (found.session, found.certificates, found.authority) == ("run-1", PEM, "an authority")
    assert found.verdict == judgement.verdict


def test_the_claim_that_was_brought_picks_the_report_that_committed_to_it(world, history):
    claim = torch.ones(2, 8, 16)
    said = hear(history, report(digests={"forward": digest_of(claim), "backward": "22" * 32}), SHADOW)
    judgement = world.facts.judgement("accusation", SHADOW, STAGE, "made up", accuser=SHADOW)
    judgement.verdict = judgement.verdict.model_copy(update={"microbatch": 0, "direction": "forward"})
    judgement.compared = ComparedTensors({"accuser": claim})
    assert case(world, history, judgement).headers["report"] == said

    judgement.compared = ComparedTensors({"accuser": claim + 1})
    assert case(world, history, judgement).headers == {}


def test_an_accomplice_is_judged_by_its_own_report(world, history):
    own = hear(history, report(), "worker-9")
    judgement = world.facts.judgement("collusion", "worker-9", STAGE, "made up")
    judgement.verdict = judgement.verdict.model_copy(update={"microbatch": 0, "direction": "forward"})

    assert case(world, history, judgement).headers["report"] == own


def test_a_stage_that_nobody_holds_is_the_owners_and_has_signed_nothing(world, history):
    hear(history, commit(stage=9), HOLDER)

    assert case(world, history, world.facts.judgement("forgery", HOLDER, 9, "made up")).headers == {}
    assert STAGE in world.facts.ledger.commits
