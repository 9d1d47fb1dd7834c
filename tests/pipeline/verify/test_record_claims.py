"""What parties say about a step, as it is taken down: only by the one that may say it, once, in this attempt."""

import pytest
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world, received

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import (
    AuditReport,
    Commit,
    Fault,
    GradientHeld,
    Ready,
    ScreenHit,
    Shutdown,
    StepAudited,
    UpdateReport,
    WeightsHeld,
)
from phalanx.pipeline.tolerance.screen import NOT_FINITE
from phalanx.pipeline.verify.audits import Audits
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import StepLedger
from phalanx.pipeline.verify.gradient_bounds import GradientBounds
from phalanx.pipeline.verify.record_claims import ClaimRecorder, FaultReports
from phalanx.pipeline.verify.referee import Referee
from phalanx.pipeline.verify.state_judgement import StateJudgement
from phalanx.telemetry import BUSY

PLACE = {"epoch": EPOCH, "step": STEP, "stage": STAGE}
GRADIENT = {"gradient": "ab" * 32, "norm_squared": 1.0}


class RecorderWorld:
    """A recorder with all that it hands messages on to."""

    def __init__(self, world):
        self.world, self.facts = world, world.facts
        self.posted = []
        facts, referee = world.facts, Referee(world.plan, world.facts.bits_decide)
        draw = AuditDraw(b"k" * 32, b"n" * 32, 1.0)
        self.audits = Audits(facts, lambda party, message, payload: self.posted.append((party, message)), referee, draw)
        self.updates = StateJudgement(facts, referee, GradientBounds(facts, referee))
        self.faults = FaultReports(facts)
        self.recorder = ClaimRecorder(facts, self.audits, self.updates, self.faults)
        self.ledger = facts.ledger = StepLedger(STEP, EPOCH, agreed=facts.agreed, messages=facts.ledger.messages)

    def take(self, message, sender):
        return self.recorder.handle(received(message, sender))


@pytest.fixture
def recorder(model_cache):
    return RecorderWorld(make_world(model_cache))


def make_recorder(model_cache, **guard):
    return RecorderWorld(make_world(model_cache, **guard))


def test_a_message_that_is_for_another_part_is_left_alone(recorder):
    assert recorder.take(Shutdown(epoch=EPOCH, reason="the end"), HOLDER) is False


# --- commitments -----------------------------------------------------------------------------------------------------


def committed(recorder, inputs=None, **changes):
    known = recorder.facts.ledger.messages
    shown = [known[(0, "forward", m)].header for m in range(4)] + [known[(2, "backward", m)].header for m in range(4)]
    recorder.facts.ledger.messages = {}
    return Commit(**{**PLACE, **GRADIENT, "received": tuple(inputs or shown), "sent": (), **changes})


def test_a_commitment_is_taken_down_with_every_input_that_it_shows(recorder):
    commit = committed(recorder)

    assert recorder.take(commit, HOLDER)

    assert recorder.ledger.commits == {STAGE: commit}
    assert {(key, said.shown_by) for key, said in recorder.ledger.messages.items()} == {
        (key, HOLDER) for m in range(4) for key in ((0, "forward", m), (2, "backward", m))
    }
    assert recorder.ledger.commit_headers[STAGE].fields.sender == HOLDER
    assert recorder.recorder.convictions == []


@pytest.mark.parametrize("sender", [SHADOW, OWNER, "worker-9"])
def test_a_commitment_to_a_stage_that_its_sender_does_not_serve_is_refused(recorder, sender):
    with pytest.raises(FrameError, match="expected it from 'worker-1'"):
        recorder.take(committed(recorder), sender)
    assert recorder.ledger.commits == {}


def test_a_commitment_to_a_stage_that_there_is_not_is_refused(recorder):
    with pytest.raises(FrameError, match="expected it from None"):
        recorder.take(committed(recorder, stage=40), HOLDER)


def test_a_second_commitment_is_refused_and_the_first_one_stays(recorder):
    first = committed(recorder)
    recorder.take(first, HOLDER)

    with pytest.raises(FrameError, match="twice"):
        recorder.take(first.model_copy(update={"norm_squared": 9.0}), HOLDER)
    assert recorder.ledger.commits[STAGE] == first


@pytest.mark.parametrize("place", [{"epoch": EPOCH - 1}, {"step": STEP + 1}, {"epoch": EPOCH + 1}])
def test_a_commitment_of_another_attempt_or_step_is_let_go(recorder, place):
    assert recorder.take(committed(recorder, **place), HOLDER)
    assert recorder.ledger.commits == {}


NOT_AN_INPUT = {
    "another session": {"run": "run-0"},
    "an earlier epoch": {"epoch": EPOCH - 1},
    "another step": {"step": STEP + 1},
    "another stage": {"target": 2},
    "another receiver": {"receiver": SHADOW},
    "a microbatch beyond the step": {"microbatch": 4},
    "another sender than holds the stage": {"sender": "worker-9"},
}


@pytest.mark.parametrize("changes", NOT_AN_INPUT.values(), ids=NOT_AN_INPUT)
def test_a_commitment_to_an_input_that_was_not_sent_here_and_now_convicts_its_author(recorder, changes):
    x = recorder.world.tensors[(HOLDER, 0, "forward", 0, False)]
    stray = recorder.world.header((0, "forward", 0), x, OWNER, HOLDER, **changes)

    assert recorder.take(committed(recorder, [stray]), HOLDER)

    (found,) = recorder.recorder.convictions
    assert (found.verdict.party, found.verdict.offence) == (HOLDER, "forgery")
    assert found.headers["message"] == stray
    assert found.headers["commit"].header.startswith("{")
    assert recorder.ledger.commits == {}


@pytest.mark.parametrize("signature", ["00" * 64, "", "no hex"], ids=["made up", "empty", "malformed"])
def test_a_commitment_to_a_forged_input_convicts_its_author(recorder, signature):
    genuine = recorder.ledger.messages[(0, "forward", 0)].header

    recorder.take(committed(recorder, [genuine.model_copy(update={"signature": signature})]), HOLDER)

    assert [found.verdict.party for found in recorder.recorder.convictions] == [HOLDER]


# --- gradients, weights, whole steps ---------------------------------------------------------------------------------


def test_a_gradient_counts_from_the_shadow_and_once(recorder):
    held = GradientHeld(**PLACE, **GRADIENT, parts=())
    with pytest.raises(FrameError, match="expected it from 'worker-2'"):
        recorder.take(held, HOLDER)

    recorder.take(held, SHADOW)

    assert recorder.ledger.held == {STAGE: held}
    with pytest.raises(FrameError, match="came twice"):
        recorder.take(held, SHADOW)


def test_a_gradient_of_a_stage_of_the_owner_is_nobodys_to_report(recorder):
    with pytest.raises(FrameError, match="expected it from None"):
        recorder.take(GradientHeld(**{**PLACE, "stage": 0}, **GRADIENT, parts=()), SHADOW)


def test_sent_weights_count_from_the_shadow_alone(recorder):
    held = WeightsHeld(**PLACE, state=recorder.world.state, parts=())
    with pytest.raises(FrameError, match="expected it from 'worker-2'"):
        recorder.take(held, HOLDER)

    recorder.take(held, SHADOW)

    assert recorder.updates.said == {STAGE: {SHADOW: recorder.world.state}}


def test_a_recomputed_step_counts_from_the_one_that_was_asked_and_once(recorder):
    said = StepAudited(**PLACE, **GRADIENT)
    with pytest.raises(FrameError, match="not asked, or again"):
        recorder.take(said, SHADOW)

    recorder.ledger.awaited_step_audits.add((STAGE, SHADOW))
    recorder.take(said, SHADOW)

    assert recorder.ledger.step_audits == {(STAGE, SHADOW): said}
    with pytest.raises(FrameError, match="not asked, or again"):
        recorder.take(said, SHADOW)


def test_of_a_step_that_lags_audits_still_count_and_commitments_do_not(model_cache):
    recorder = make_recorder(model_cache, commit_lag=1)
    before, recorder.facts.previous = recorder.ledger, recorder.ledger
    before.awaited_step_audits.add((STAGE, SHADOW))
    commit = committed(recorder)
    recorder.facts.ledger = StepLedger(STEP + 1, EPOCH)

    recorder.take(StepAudited(**PLACE, **GRADIENT), SHADOW)
    recorder.take(commit, HOLDER)

    assert list(before.step_audits) == [(STAGE, SHADOW)]
    assert (before.commits, recorder.facts.ledger.commits) == ({}, {})


def test_a_report_that_nobody_asked_for_is_refused(recorder):
    report = AuditReport(**PLACE, microbatch=0, inputs=(), digests={}, order=1)

    with pytest.raises(FrameError, match="not asked for, or again"):
        recorder.take(report, SHADOW)

    recorder.ledger.awaited_audits.add((STAGE, 0, SHADOW))
    recorder.take(report, SHADOW)
    assert recorder.audits.said == {(STEP, (STAGE, 0, SHADOW))}


# --- states ----------------------------------------------------------------------------------------------------------


def applied(recorder, states=None, usage=None, bytes_sent=None, **place):
    states = {"1": recorder.world.state} if states is None else states
    body = {"states": states, "usage": usage or {}, "bytes_sent": bytes_sent or {}}
    return UpdateReport(**{"epoch": EPOCH, "step": STEP, **place}, **body)


@pytest.mark.parametrize("sender", [HOLDER, SHADOW])
def test_a_state_counts_from_either_copy(recorder, sender):
    recorder.take(applied(recorder), sender)

    assert recorder.updates.said == {STAGE: {sender: recorder.world.state}}


@pytest.mark.parametrize("name", ["3", "7", "99999"])
def test_a_state_of_a_stage_that_its_sender_does_not_have_is_refused(recorder, name):
    with pytest.raises(FrameError, match="does not have"):
        recorder.take(applied(recorder, {name: recorder.world.state}), HOLDER)


@pytest.mark.parametrize("name", ["1" * 4000, "000001", "x", ""])
def test_a_text_that_is_no_number_of_a_stage_is_refused_unread(recorder, name):
    odd = UpdateReport.model_construct(
        epoch=EPOCH, step=STEP, states={name: recorder.world.state}, usage={}, bytes_sent={}
    )

    with pytest.raises(FrameError, match="does not have"):
        recorder.recorder.handle(ReceivedMessage(HOLDER, odd, memoryview(b""), None))


@pytest.mark.parametrize("what", ["another step", "another epoch"])
def test_a_state_of_another_time_is_let_go(recorder, what):
    state = recorder.world.state
    if what == "another step":
        recorder.take(applied(recorder, {"1": state.model_copy(update={"step": STEP + 1})}), HOLDER)
    else:
        recorder.take(applied(recorder, epoch=EPOCH - 1), HOLDER)

    assert recorder.updates.said == {}


def test_a_shadow_that_follows_has_no_state_of_its_own_to_report(model_cache):
    recorder = make_recorder(model_cache, shadow="update")

    recorder.take(applied(recorder), SHADOW)
    assert recorder.updates.said == {}

    recorder.take(applied(recorder), HOLDER)
    assert recorder.updates.said == {STAGE: {HOLDER: recorder.world.state}}


# --- costs -----------------------------------------------------------------------------------------------------------


def test_bytes_that_were_once_sent_never_fall_and_count_for_parties_of_the_run_alone(recorder):
    recorder.take(applied(recorder, bytes_sent={OWNER: 100, SHADOW: 7, "worker-77": 5, HOLDER: 3}), HOLDER)
    assert recorder.recorder.bytes_sent[HOLDER] == {OWNER: 100, SHADOW: 7}

    recorder.take(applied(recorder, bytes_sent={OWNER: 40}), HOLDER)
    assert recorder.recorder.bytes_sent[HOLDER] == {OWNER: 100, SHADOW: 7}

    recorder.take(applied(recorder, bytes_sent={OWNER: 140}), HOLDER)
    assert recorder.recorder.bytes_sent[HOLDER] == {OWNER: 140, SHADOW: 7}


def test_nobody_has_worked_for_longer_than_the_run_lasts(recorder):
    recorder.take(applied(recorder, usage={BUSY: 9e9}), HOLDER)
    assert 0.0 < recorder.recorder.busy[HOLDER] < 9e9

    recorder.take(applied(recorder, usage={BUSY: 0.0}), SHADOW)
    assert recorder.recorder.busy[SHADOW] == 0.0
    assert BUSY not in recorder.recorder.usage[SHADOW]


# --- readiness -------------------------------------------------------------------------------------------------------


def ready(recorder, *stages, epoch=EPOCH):
    return Ready(epoch=epoch, states={str(stage): recorder.world.state for stage in stages})


def test_a_party_is_ready_with_what_it_has(recorder):
    message = ready(recorder, 1, 2)

    recorder.take(message, HOLDER)

    assert recorder.recorder.ready == {HOLDER: message}


def test_a_stage_that_rests_may_be_ready_too(recorder):
    facts = recorder.facts
    facts.resting = type(facts.assignment)({3: HOLDER}, {})

    recorder.take(ready(recorder, 3), HOLDER)

    assert HOLDER in recorder.recorder.ready


def test_a_party_that_is_ready_with_what_it_does_not_have_is_refused(recorder):
    with pytest.raises(FrameError, match="stage 3"):
        recorder.take(ready(recorder, 1, 3), HOLDER)
    assert recorder.recorder.ready == {}


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_readiness_for_other_roles_is_let_go(recorder, epoch):
    assert recorder.take(ready(recorder, 1, epoch=epoch), HOLDER)
    assert recorder.recorder.ready == {}


def test_a_complaint_is_handed_on(recorder):
    fault = Fault(epoch=EPOCH, about=HOLDER, error="FrameError", reason="odd")

    assert recorder.take(fault, SHADOW)

    assert recorder.faults.weigh() is None
    assert [kind for kind, _ in recorder.world.events] == ["fault"]


# --- odd messages ----------------------------------------------------------------------------------------------------


def hit(source=STAGE, direction="forward", microbatch=0, reason="its norm is odd", **place):
    body = {"epoch": EPOCH, "step": STEP, "microbatch": microbatch, "direction": direction, "source": source}
    return ScreenHit(**{**body, **place}, reason=reason)


@pytest.mark.parametrize(("direction", "receiver"), [("forward", SHADOW), ("backward", OWNER)])
def test_an_odd_message_is_audited_when_its_receiver_says_so(recorder, direction, receiver):
    recorder.take(hit(direction=direction), receiver)

    assert list(recorder.audits.screened) == [(STAGE, 0)]
    ((auditor, audit),) = recorder.posted
    assert (auditor, audit.kind, audit.microbatches, audit.urgent) == (SHADOW, "audit", (0,), True)
    assert [(kind, body["party"]) for kind, body in recorder.world.events] == [("screen_hit", HOLDER)]


@pytest.mark.parametrize("sender", [HOLDER, OWNER, "worker-9"])
def test_an_odd_message_is_its_receivers_to_report(recorder, sender):
    with pytest.raises(FrameError, match="expected it from 'worker-2'"):
        recorder.take(hit(), sender)
    assert recorder.posted == []


def test_a_message_of_a_stage_next_to_none_is_nobodys_to_report(recorder):
    with pytest.raises(FrameError, match="expected it from None"):
        recorder.take(hit(source=3), OWNER)


def test_a_message_of_the_owner_needs_no_audit(recorder):
    with pytest.raises(FrameError, match="of the owner"):
        recorder.take(hit(source=0), HOLDER)


def test_a_message_of_a_stage_that_the_owner_serves_needs_no_audit(recorder):
    facts = recorder.facts
    facts.assignment = type(facts.assignment)({0: OWNER, 1: OWNER, 2: SHADOW, 3: OWNER}, {1: HOLDER})

    with pytest.raises(FrameError, match="of the owner"):
        recorder.take(hit(), SHADOW)


@pytest.mark.parametrize("again", [hit(), hit(microbatch=4)], ids=["twice", "beyond the step"])
def test_a_message_looks_odd_once_and_is_one_of_the_step(recorder, again):
    recorder.take(hit(), SHADOW)

    with pytest.raises(FrameError, match="was screened before"):
        recorder.take(again, SHADOW)


# --- statistics alone ------------------------------------------------------------------------------------------------


@pytest.fixture
def statistics(model_cache):
    return make_recorder(model_cache, mode="statistics")


def test_where_statistics_alone_decide_the_third_odd_message_of_a_party_condemns_it(statistics):
    for microbatch in range(3):
        assert statistics.recorder.convictions == []
        statistics.take(hit(microbatch=microbatch), SHADOW)

    (found,) = statistics.recorder.convictions
    assert (found.verdict.party, found.verdict.offence) == (HOLDER, "statistics")
    # the first two were let go, so that the step goes on
    assert [(party, message.kind, message.microbatch) for party, message in statistics.posted] == [
        (SHADOW, "release", 0),
        (SHADOW, "release", 1),
    ]


def test_where_statistics_alone_decide_what_is_no_number_condemns_at_once(statistics):
    statistics.take(hit(reason=NOT_FINITE), SHADOW)

    assert [found.verdict.party for found in statistics.recorder.convictions] == [HOLDER]


def test_strikes_are_counted_by_party(statistics):
    statistics.take(hit(), SHADOW)
    statistics.take(hit(microbatch=1), SHADOW)
    statistics.take(hit(source=2, direction="forward"), OWNER)

    assert statistics.recorder.convictions == []
