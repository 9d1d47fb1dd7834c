"""When a step may be applied, decided by itself: not before everything that the guard checks is in and was right."""

import pytest
from hand_made import EPOCH, HOLDER, SHADOW, STAGE, STEP, make_world

from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.protocol.carried_frames import CarriedFrames
from phalanx.pipeline.protocol.messages import GradientHeld, ScreenHit
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import StepLedger

OTHER = 2


class Step:
    """A step in which everything is in and was right, until a test takes something away."""

    def __init__(self, model_cache, *, owner_rate=0.0, **guard):
        self.world = make_world(model_cache, **guard)
        self.facts = self.world.facts
        self.world.whole_step()
        self.facts.agreed_states[2] = self.world.state
        draw = AuditDraw(b"k" * 32, b"n" * 32, 1.0, owner_rate=owner_rate)
        self.coordinator = Coordinator(self.facts, draw, CarriedFrames())
        self.ledger = self.facts.ledger
        self.ledger.audits_drawn = True
        self.ledger.gradients_agreed = {STAGE, OTHER}

    @property
    def posted(self):
        return self.world.sent

    def decided(self, *, may_lag=True):
        return self.coordinator.is_decided(may_lag=may_lag)

    def advance(self):
        return self.world.judge_page(self.coordinator.draw_conclusions())


@pytest.fixture
def step(model_cache):
    return Step(model_cache)


def test_a_step_is_decided_when_everything_is_in(step):
    assert step.decided()
    assert step.coordinator.describe_missing() == "nothing"


def without_commitment(step):
    del step.ledger.commits[STAGE]


def without_draw(step):
    step.ledger.audits_drawn = False


def without_report(step):
    step.ledger.awaited_audits.add((STAGE, 0, SHADOW))


def without_gradient(step):
    step.ledger.gradients_agreed.discard(STAGE)


def without_state(step):
    del step.facts.agreed_states[STAGE]


def without_step_audit(step):
    step.ledger.awaited_step_audits.add((STAGE, SHADOW))


def without_owners_audit(step):
    step.ledger.owners_audits.add(STAGE)


def with_an_odd_message(step):
    place = {"epoch": EPOCH, "step": STEP, "microbatch": 0, "direction": "forward", "source": STAGE}
    step.coordinator._audits.ask_urgently(ScreenHit(**place, reason="its norm is odd"))


MISSING = [without_commitment, without_draw, without_report, without_gradient, without_state, without_step_audit]


@pytest.mark.parametrize("how", [*MISSING, without_owners_audit, with_an_odd_message])
def test_while_anything_is_missing_a_step_is_not_decided(step, how):
    how(step)

    assert not step.decided()


@pytest.mark.parametrize(
    "how", [without_commitment, without_report, without_gradient, without_state, without_step_audit]
)
def test_what_is_missing_is_said(step, how):
    how(step)

    assert "1" in step.coordinator.describe_missing()


def test_without_a_guard_commitments_are_enough(model_cache):
    step = Step(model_cache, mode="off")
    step.facts.agreed_states.clear()
    step.ledger.audits_drawn = False
    assert step.decided()

    del step.ledger.commits[STAGE]
    assert not step.decided()


@pytest.mark.parametrize("may_lag", [True, False])
@pytest.mark.parametrize("only_shadows", [True, False])
def test_audits_may_lag_where_shadows_alone_were_asked_and_nothing_speaks_against_it(
    model_cache, may_lag, only_shadows
):
    step = Step(model_cache, commit_lag=1)
    without_report(step)
    step.ledger.may_lag = only_shadows

    assert step.decided(may_lag=may_lag) is (may_lag and only_shadows)


def test_the_next_step_waits_for_the_audits_of_the_one_that_lags(model_cache):
    step = Step(model_cache, commit_lag=1)
    step.facts.previous = StepLedger(STEP - 1 if STEP else 0, EPOCH, audits_drawn=True)
    assert step.decided()

    step.facts.previous.awaited_audits.add((STAGE, 0, SHADOW))
    assert not step.decided()
    assert "audits of the last step" in step.coordinator.describe_missing()


# --- a step that comes to no number ----------------------------------------------------------------------------------


def test_a_step_that_comes_to_no_number_is_redone_by_the_owner_once(step):
    assert step.coordinator.order_owner_audits()
    assert step.ledger.owners_audits == {1, 2}

    step.ledger.owners_audits.clear()
    step.ledger.owner_audited |= {1, 2}

    assert not step.coordinator.order_owner_audits()


def test_without_a_guard_nothing_is_redone(model_cache):
    step = Step(model_cache, mode="off")

    assert not step.coordinator.order_owner_audits()
    assert step.ledger.owners_audits == set()


# --- what follows from what is in ------------------------------------------------------------------------------------


def test_audits_are_drawn_when_every_stage_has_committed_and_not_before(step):
    step.ledger.audits_drawn = False
    commit = step.ledger.commits.pop(OTHER)
    step.advance()
    assert (step.posted, step.ledger.audits_drawn) == ([], False)

    step.ledger.commits[OTHER] = commit
    step.coordinator.look_again()
    step.advance()

    assert step.ledger.audits_drawn
    assert {party for party, _ in step.posted} == {HOLDER, SHADOW}


def test_nothing_is_drawn_before_the_states_are_agreed_on(step):
    step.ledger.audits_drawn = False
    del step.facts.agreed_states[2]

    step.advance()

    assert not step.ledger.audits_drawn


def test_nothing_is_drawn_when_two_commitments_contradict_each_other(step):
    step.ledger.audits_drawn = False
    commit = step.ledger.commits[STAGE]
    step.ledger.commits[STAGE] = commit.model_copy(update={"sent": commit.sent[1:]})

    assert step.advance().verdict.party == HOLDER
    assert (step.posted, step.ledger.audits_drawn) == ([], False)


def test_without_news_nothing_is_looked_at(step):
    while step.coordinator.has_news:
        step.advance()
    step.ledger.gradients_agreed.discard(STAGE)
    said = {"gradient": "bb" * 32, "norm_squared": 1.0}
    step.ledger.held[STAGE, SHADOW] = GradientHeld(epoch=EPOCH, step=STEP, stage=STAGE, **said, parts=())

    assert step.advance() is None
    step.coordinator.look_again()
    assert step.advance().verdict.party == SHADOW


def test_the_owner_audits_last_and_each_stage_once(model_cache):
    step = Step(model_cache, owner_rate=1.0)
    step.facts.assignment = Assignment(step.facts.assignment.holders, {STAGE: SHADOW})
    step.ledger.owners_audits.add(STAGE)
    without_report(step)
    step.advance()
    assert step.ledger.owners_audits == {STAGE}

    step.ledger.reports[(STAGE, 0, SHADOW)] = step.world.report()
    step.world.lie(-step.world.truth("forward", 1), "forward", 1)
    step.coordinator.look_again()

    assert step.advance().verdict.party == HOLDER
    assert (step.ledger.owners_audits, step.ledger.owner_audited, step.ledger.num_audits) == (set(), {STAGE}, 4)


def test_what_was_proved_together_with_something_else_is_judged_next_if_its_party_is_still_there(step):
    gone = step.facts.make_judgement("collusion", "worker-7", STAGE, "made up")
    here = step.facts.make_judgement("collusion", SHADOW, STAGE, "made up")
    step.facts.proved += [gone, here]

    assert step.advance() is here
    assert step.facts.proved == []


def test_at_a_return_to_a_checkpoint_what_is_proved_is_handed_out_once_for_each_party_that_is_left(step):
    judgements = [
        step.facts.make_judgement("collusion", name, STAGE, "made up") for name in (SHADOW, SHADOW, "worker-7")
    ]
    step.facts.proved += judgements

    assert step.coordinator.take_proved([HOLDER, SHADOW]) == [judgements[0]]
    assert step.facts.proved == []


# --- roles -----------------------------------------------------------------------------------------------------------


def test_a_new_step_forgets_what_was_said_and_keeps_the_step_before(step):
    step.coordinator.add_ready_states(STAGE, {HOLDER: step.world.state, SHADOW: None})
    step.facts.unanswered.add(SHADOW)
    assert step.coordinator.progress_counts[3] == 1

    step.coordinator.open_step(STEP + 1)

    assert (step.facts.previous, step.facts.ledger.step) == (step.ledger, STEP + 1)
    assert (step.facts.agreed_states, step.facts.unanswered) == ({}, set())
    assert step.coordinator.progress_counts[3] == 0
