"""What parties say about a step, as it is taken down: only by the one that may say it, once, in this attempt."""

import json

import pytest
from hand_made import EPOCH, HOLDER, OWNER, SHADOW, STAGE, STEP, make_world, received

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.messages import (
    AuditReport,
    Commit,
    Fault,
    GradientHeld,
    Ready,
    ScreenHit,
    SentDigest,
    Shutdown,
    StepAudited,
    UpdateReport,
    parse_message,
)
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
        self.ledger = facts.ledger = StepLedger(STEP, EPOCH, agreed=facts.agreed_states, messages=facts.ledger.messages)

    def take(self, message, sender):
        return self.recorder.record_message(received(message, sender))


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


def test_a_commitment_that_comes_twice_is_refused_and_convicts_nobody(recorder):
    first = committed(recorder)
    recorder.take(first, HOLDER)

    with pytest.raises(FrameError, match="twice"):
        recorder.take(first, HOLDER)
    assert (recorder.ledger.commits[STAGE], recorder.recorder.convictions) == (first, [])


def equivocation_of(recorder, party):
    """Return the kinds of the two messages in which a party contradicted itself, as evidence shows them."""
    (found,) = recorder.recorder.convictions
    assert (found.verdict.party, found.verdict.offence) == (party, "equivocation")
    assert found.headers["first"] != found.headers["second"]
    return [json.loads(found.headers[role].header)["kind"] for role in ("first", "second")]


@pytest.mark.parametrize("change", [{"norm_squared": 9.0}, {"gradient": "cd" * 32}, {"sent": ()}])
def test_a_second_commitment_to_something_else_convicts_and_the_first_one_stays(recorder, change):
    sent = (SentDigest(direction="forward", microbatch=0, digest="ab" * 32),)
    first = committed(recorder, sent=sent)
    recorder.take(first, HOLDER)

    recorder.take(first.model_copy(update=change), HOLDER)

    assert equivocation_of(recorder, HOLDER) == ["commit", "commit"]
    assert recorder.ledger.commits[STAGE] == first


@pytest.mark.parametrize("place", [{"epoch": EPOCH - 1}, {"step": STEP + 1}, {"epoch": EPOCH + 1}])
def test_a_commitment_of_another_attempt_or_step_is_let_go(recorder, place):
    assert recorder.take(committed(recorder, **place), HOLDER)
    assert recorder.ledger.commits == {}
    # what the run ignores is not part of any proof either
    assert len(recorder.facts.record) == 0


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

    assert recorder.ledger.held == {(STAGE, SHADOW): held}
    with pytest.raises(FrameError, match="twice"):
        recorder.take(held, SHADOW)


def test_a_gradient_of_a_stage_of_the_owner_is_nobodys_to_report(recorder):
    with pytest.raises(FrameError, match="expected it from None"):
        recorder.take(GradientHeld(**{**PLACE, "stage": 0}, **GRADIENT, parts=()), SHADOW)


def test_a_second_gradient_that_is_another_one_convicts_the_shadow(recorder):
    held = GradientHeld(**PLACE, **GRADIENT, parts=())
    recorder.take(held, SHADOW)

    recorder.take(held.model_copy(update={"norm_squared": 2.0}), SHADOW)

    assert equivocation_of(recorder, SHADOW) == ["gradient_held", "gradient_held"]
    assert recorder.ledger.held == {(STAGE, SHADOW): held}


ORDER = 5


def audited(**changes):
    return StepAudited(**{**PLACE, **GRADIENT, "order": ORDER, **changes})


def ask_for_step_audit(recorder, auditor=SHADOW, ledger=None):
    ledger = ledger or recorder.ledger
    ledger.awaited_step_audits.add((STAGE, auditor))
    ledger.orders[(STAGE, auditor)] = ORDER


def test_a_recomputed_step_counts_from_the_one_that_was_asked_and_once(recorder):
    with pytest.raises(FrameError, match="not requested"):
        recorder.take(audited(), SHADOW)

    ask_for_step_audit(recorder)
    recorder.take(audited(), SHADOW)

    assert recorder.ledger.step_audits == {(STAGE, SHADOW): audited()}
    with pytest.raises(FrameError, match="twice"):
        recorder.take(audited(), SHADOW)
    assert recorder.recorder.convictions == []


def test_a_second_recomputed_gradient_that_is_another_one_convicts_its_author(recorder):
    ask_for_step_audit(recorder)
    recorder.take(audited(), SHADOW)

    recorder.take(audited(gradient="cd" * 32), SHADOW)

    assert equivocation_of(recorder, SHADOW) == ["step_audited", "step_audited"]
    assert recorder.ledger.step_audits == {(STAGE, SHADOW): audited()}


@pytest.mark.parametrize("order", [ORDER - 1, ORDER + 1, 0])
def test_a_recomputed_step_for_another_order_is_refused_and_not_stored(recorder, order):
    ask_for_step_audit(recorder)

    with pytest.raises(FrameError, match="not requested"):
        recorder.take(audited(order=order), SHADOW)
    assert (recorder.ledger.step_audits, len(recorder.facts.record)) == ({}, 0)


def test_of_a_step_that_lags_audits_still_count_and_commitments_do_not(model_cache):
    recorder = make_recorder(model_cache, commit_lag=1)
    before, recorder.facts.previous = recorder.ledger, recorder.ledger
    ask_for_step_audit(recorder)
    commit = committed(recorder)
    recorder.facts.ledger = StepLedger(STEP + 1, EPOCH)

    recorder.take(audited(), SHADOW)
    recorder.take(commit, HOLDER)

    assert list(before.step_audits) == [(STAGE, SHADOW)]
    assert (before.commits, recorder.facts.ledger.commits) == ({}, {})
    assert [key.kind for key in recorder.facts.record._statements] == ["step_audited"]


def report(order=ORDER, **changes):
    return AuditReport(**{**PLACE, "microbatch": 0, "inputs": (), "digests": {}, "order": order, **changes})


def ask_for_audit(recorder):
    recorder.ledger.awaited_audits.add((STAGE, 0, SHADOW))
    recorder.ledger.orders[(STAGE, SHADOW)] = ORDER


def test_a_report_that_nobody_asked_for_is_refused(recorder):
    with pytest.raises(FrameError, match="not asked for"):
        recorder.take(report(), SHADOW)

    ask_for_audit(recorder)
    with pytest.raises(FrameError, match="not asked for"):
        recorder.take(report(order=ORDER + 1), SHADOW)
    assert len(recorder.facts.record) == 0

    recorder.take(report(), SHADOW)
    assert recorder.audits.unweighed_audits == {(STEP, (STAGE, 0, SHADOW))}


def test_a_second_report_on_one_order_convicts_where_it_says_something_else(recorder):
    ask_for_audit(recorder)
    recorder.take(report(), SHADOW)
    with pytest.raises(FrameError, match="twice"):
        recorder.take(report(), SHADOW)
    assert recorder.recorder.convictions == []

    recorder.take(report(digests={"forward": "11" * 32}), SHADOW)

    assert equivocation_of(recorder, SHADOW) == ["audit_report", "audit_report"]


# --- states ----------------------------------------------------------------------------------------------------------


def applied(recorder, states=None, usage=None, bytes_sent=None, **place):
    states = {"1": recorder.world.state} if states is None else states
    body = {"states": states, "usage": usage or {}, "bytes_sent": bytes_sent or {}}
    return UpdateReport(**{"epoch": EPOCH, "step": STEP, **place}, **body)


@pytest.mark.parametrize("sender", [HOLDER, SHADOW])
def test_a_state_counts_from_either_copy(recorder, sender):
    recorder.take(applied(recorder), sender)

    assert recorder.updates.reported_states == {STAGE: {sender: recorder.world.state}}


@pytest.mark.parametrize("name", ["3", "7", "99999"])
def test_a_state_of_a_stage_that_its_sender_does_not_have_is_refused(recorder, name):
    with pytest.raises(FrameError, match="does not hold"):
        recorder.take(applied(recorder, {name: recorder.world.state}), HOLDER)


@pytest.mark.parametrize("name", ["1" * 4000, "000001", "01", "x", "", "-1", "+1", " 1", "1_0", "\u0661"])
@pytest.mark.parametrize("kind", [UpdateReport, Ready])
def test_a_text_that_is_not_the_one_spelling_of_a_stages_number_is_refused_unread(recorder, name, kind):
    costs = {"step": STEP, "usage": {}, "bytes_sent": {}} if kind is UpdateReport else {}
    body = {"epoch": EPOCH, "states": {name: recorder.world.state.model_dump()}, **costs}

    with pytest.raises(FrameError):
        parse_message(kind.kind, body)


@pytest.mark.parametrize("what", ["another step", "another epoch"])
def test_a_state_of_another_time_is_let_go(recorder, what):
    state = recorder.world.state
    if what == "another step":
        recorder.take(applied(recorder, {"1": state.model_copy(update={"step": STEP + 1})}), HOLDER)
    else:
        recorder.take(applied(recorder, epoch=EPOCH - 1), HOLDER)

    assert recorder.updates.reported_states == {}
    assert len(recorder.facts.record) == 0


def test_a_second_state_that_is_another_one_convicts_its_author_and_the_first_one_stays(recorder):
    recorder.take(applied(recorder), HOLDER)
    recorder.take(applied(recorder), HOLDER)
    assert recorder.recorder.convictions == []

    recorder.take(applied(recorder, {"1": recorder.world.state.model_copy(update={"moments": "cc" * 32})}), HOLDER)

    assert equivocation_of(recorder, HOLDER) == ["applied", "applied"]
    assert recorder.updates.reported_states == {STAGE: {HOLDER: recorder.world.state}}


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


def test_a_party_that_is_ready_with_what_it_does_not_have_is_refused(recorder):
    with pytest.raises(FrameError, match="stage 3"):
        recorder.take(ready(recorder, 1, 3), HOLDER)
    assert recorder.recorder.ready == {}


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_readiness_for_other_roles_is_let_go(recorder, epoch):
    assert recorder.take(ready(recorder, 1, epoch=epoch), HOLDER)
    assert recorder.recorder.ready == {}
    assert len(recorder.facts.record) == 0


@pytest.mark.parametrize("steps_ahead", [1, 2, 10**6])
def test_states_of_steps_to_come_are_not_stored_however_many_they_are(recorder, steps_ahead):
    state = recorder.world.state.model_copy(update={"step": STEP + steps_ahead})

    recorder.take(Ready(epoch=EPOCH, states={"1": state}), HOLDER)

    assert len(recorder.facts.record) == 0


def test_who_gets_ready_twice_is_refused_and_convicted_where_the_two_differ(recorder):
    recorder.take(ready(recorder, 1), HOLDER)
    with pytest.raises(FrameError, match="twice"):
        recorder.take(ready(recorder, 1), HOLDER)
    assert recorder.recorder.convictions == []

    other = recorder.world.state.model_copy(update={"weights": "cc" * 32})
    recorder.take(Ready(epoch=EPOCH, states={"1": other}), HOLDER)

    assert equivocation_of(recorder, HOLDER) == ["ready", "ready"]
    assert recorder.recorder.ready == {HOLDER: ready(recorder, 1)}


def test_a_complaint_is_handed_on(recorder):
    fault = Fault(epoch=EPOCH, about=HOLDER, error="FrameError", reason="odd")

    assert recorder.take(fault, SHADOW)

    assert recorder.faults.weigh_faults() is None
    assert [kind for kind, _ in recorder.world.events] == ["fault"]


# --- odd messages ----------------------------------------------------------------------------------------------------


def hit(source=STAGE, direction="forward", microbatch=0, reason="its norm is odd", **place):
    body = {"epoch": EPOCH, "step": STEP, "microbatch": microbatch, "direction": direction, "source": source}
    return ScreenHit(**{**body, **place}, reason=reason)


@pytest.mark.parametrize(("direction", "receiver"), [("forward", SHADOW), ("backward", OWNER)])
def test_an_odd_message_is_audited_when_its_receiver_says_so(recorder, direction, receiver):
    recorder.take(hit(direction=direction), receiver)

    assert list(recorder.audits.screened) == [(STAGE, direction, 0)]
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
