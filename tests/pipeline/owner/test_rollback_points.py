"""How far a run goes back, decided by itself: no further than every copy reaches, no less than what is unverified."""

import pytest
from hand_made import HOLDER, OWNER, SHADOW, make_world

from phalanx.engine import StepInputs
from phalanx.errors import NoHolderError
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.owner.rollback import PastStep, Rollback
from phalanx.pipeline.verify.facts import StepLedger

PRESENT = Assignment({0: OWNER, 1: HOLDER, 2: OWNER}, {1: SHADOW})
HEIRS = Assignment({0: OWNER, 1: SHADOW, 2: OWNER}, {1: "worker-9"})
INPUTS = StepInputs((), (), 0)


class Points:
    """In the place of the owner's kept states: every point that was taken stays."""

    def __init__(self, every, state):
        self.steps, self._every, self._state = [], every, state

    def take(self, step):
        if not self.steps or step % self._every == 0:
            self.steps.append(step)

    def __contains__(self, step):
        return step in self.steps

    def point_before(self, step, oldest):
        usable = [kept for kept in self.steps if kept >= oldest]
        return max((kept for kept in usable if kept <= step), default=min(usable, default=None))

    def point_digests(self, step):
        return {1: self._state(step)}

    def forget_after(self, step):
        self.steps = [kept for kept in self.steps if kept <= step]


class Run:
    """A rollback that has seen some steps, with the roles as they were from step 0 on."""

    def __init__(self, model_cache, steps=8, begin=0, past_bytes=0, vouched=(), **guard):
        self.world = make_world(model_cache, **{"keep_states": 0, **guard})
        self.facts = self.world.facts
        self.facts.assignment = PRESENT
        self.facts.classes = dict.fromkeys((OWNER, HOLDER, SHADOW, "worker-9", f"{HOLDER}.2"), "one")
        every = self.facts.plan.guard.keep_states
        self.kept = Points(every, self.state)
        self.rollback = Rollback(self.facts, self.kept, past_bytes)
        self.rollback.note_copies(PRESENT, begin)
        for step in range(begin, begin + steps):
            if every:
                self.kept.take(step)
            self.facts.ledger = StepLedger(step, 0, agreed={1: self.state(step)})
            if step in vouched:
                self.facts.ledger.awaited_step_audits.add((1, SHADOW))
            self.rollback.remember_step(PastStep(self.facts.ledger, PRESENT, INPUTS))
        self.facts.previous, self.facts.ledger = self.facts.ledger, StepLedger(begin + steps, 0)

    def state(self, step):
        return self.world.state.model_copy(update={"step": step})

    def first_bad(self, gone=HOLDER, refuted=None):
        offence, step = ("message", None) if refuted is None else ("state", refuted + 1)
        verdict = self.facts.make_judgement(offence, gone, 1, "made up", step=step).verdict
        return self.rollback.find_way_back(gone, verdict)

    def serve(self, assignment, steps):
        """Go on with other roles, from the present step."""
        self.facts.assignment = assignment
        begin = self.facts.ledger.step
        self.rollback.note_copies(assignment, begin)
        for step in range(begin, begin + steps):
            self.kept.take(step)
            self.facts.ledger = StepLedger(step, 0, agreed={1: self.state(step)})
            self.rollback.remember_step(PastStep(self.facts.ledger, assignment, INPUTS))
        self.facts.previous, self.facts.ledger = self.facts.ledger, StepLedger(begin + steps, 0)


def test_without_anything_kept_the_run_does_not_go_back(model_cache):
    assert Run(model_cache).first_bad() is None


@pytest.mark.parametrize(("audited", "back"), [(False, 7), (True, None)])
def test_a_step_that_was_applied_before_its_audits_is_undone(model_cache, audited, back):
    run = Run(model_cache, commit_lag=1)
    run.facts.previous.audits_drawn = audited

    assert (run.rollback.unverified_step, run.first_bad()) == (back, back)


# --- kept states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "back"), [(3, 0), (5, 0), (8, 0), (9, 4), (11, 4), (13, 8)])
def test_with_kept_states_the_run_goes_back_as_far_as_batches_are_remembered(model_cache, steps, back):
    run = Run(model_cache, steps=steps, keep_states=4)

    assert run.first_bad() == back


def test_where_batches_are_small_every_step_of_the_session_is_remembered(model_cache):
    run = Run(model_cache, steps=23, keep_states=4, past_bytes=2**20)

    assert run.first_bad() == 0
    run.rollback.undo_steps(0, 23)
    assert sorted(run.rollback.undone_batches) == list(range(23))


@pytest.mark.parametrize(("steps", "back"), [(3, 2), (9, 4), (12, 8)])
def test_kept_states_begin_where_the_session_does(model_cache, steps, back):
    run = Run(model_cache, steps=steps, begin=2, keep_states=4)

    assert run.first_bad() == back


@pytest.mark.parametrize(("vouched", "back"), [(range(5), 4), (range(1, 8), 0), (range(8), None), (range(9), None)])
def test_it_goes_back_to_before_the_first_step_that_nobody_recomputed(model_cache, vouched, back):
    run = Run(model_cache, steps=8, keep_states=4, vouched=vouched)

    assert run.first_bad() == back


def test_the_word_of_a_distrusted_auditor_counts_no_more(model_cache):
    run = Run(model_cache, steps=8, keep_states=4, vouched=range(8))

    assert run.first_bad() is None
    assert run.first_bad(gone=SHADOW) == 0


def test_an_update_that_was_refuted_is_undone_whoever_had_recomputed_it(model_cache):
    run = Run(model_cache, steps=8, keep_states=4, vouched=range(8))

    assert run.first_bad(refuted=7) == 4


def test_roles_that_change_move_no_point(model_cache):
    run = Run(model_cache, steps=6, keep_states=4)
    # the holder died, its heir lies
    run.serve(HEIRS, 1)

    assert run.first_bad(gone=SHADOW) == 4


def test_all_lives_of_a_certificate_count(model_cache):
    run = Run(model_cache, steps=3, keep_states=4, past_bytes=2**20)
    run.serve(HEIRS, 3)
    run.serve(Assignment({0: OWNER, 1: f"{HOLDER}.2", 2: OWNER}, {1: SHADOW}), 3)

    assert run.first_bad(gone=f"{HOLDER}.2") == 0


def test_who_came_late_takes_back_no_more_than_since_then(model_cache):
    run = Run(model_cache, steps=9, keep_states=4)
    run.serve(Assignment({0: OWNER, 1: "worker-9", 2: OWNER}, {1: SHADOW}), 2)

    assert run.first_bad(gone="worker-9") == 8
    assert run.first_bad(gone=HOLDER) == 4


def test_every_party_begins_with_the_owners_state_after_it(model_cache):
    run = Run(model_cache, steps=6, keep_states=4)

    run.rollback.undo_steps(4, 6)

    assert run.rollback.restored_step == 4
    assert run.rollback.without_young_copies(PRESENT, 4, ()) is None
    assert run.facts.ledger.agreed == {1: run.state(4)}


def test_a_step_that_lags_is_undone_with_what_the_copies_have(model_cache):
    run = Run(model_cache, steps=6, keep_states=4, commit_lag=1, vouched=range(6))

    assert run.first_bad(gone="worker-9") == 5
    run.rollback.undo_steps(5, 6)
    assert run.rollback.restored_step is None


# --- undoing ---------------------------------------------------------------------------------------------------------


def test_what_is_undone_is_remembered_to_be_done_again_and_the_state_before_it_is_agreed_on(model_cache):
    run = Run(model_cache, keep_states=4)

    run.rollback.undo_steps(5, 8)

    assert sorted(run.rollback.undone_batches) == [5, 6, 7]
    assert run.facts.ledger.agreed == {1: run.state(5)}
    assert run.facts.previous.step == 4
    assert run.world.events == [("rolled_back", {"step": 8, "to": 5})]
    run.rollback.undo_steps(4, 5)
    assert sorted(run.rollback.undone_batches) == [4, 5, 6, 7]


def test_a_state_that_is_not_remembered_is_not_agreed_on(model_cache):
    run = Run(model_cache)

    run.rollback.undo_steps(3, 8)

    assert (run.facts.ledger.agreed, run.facts.previous) == ({}, None)
    assert sorted(run.rollback.undone_batches) == [7]


def test_of_steps_between_kept_states_headers_are_let_go(model_cache):
    run = Run(model_cache, keep_states=4)
    ledger = StepLedger(8, 0, agreed={1: run.state(8)})
    ledger.messages, ledger.reports = dict(run.world.facts.ledger.messages), {}
    ledger.commit_headers[1] = None
    run.rollback.remember_step(PastStep(ledger, PRESENT, INPUTS))

    kept = run.rollback._step_history.find_step(8)

    assert (kept.ledger.messages, kept.ledger.commit_headers, kept.states_before) == ({}, {}, ledger.agreed)
    # the ledger of the step itself is left as it is
    assert ledger.commit_headers


# --- what shadows reach ----------------------------------------------------------------------------------------------


EVERYBODY = (OWNER, HOLDER, SHADOW, "worker-9")


def test_a_shadow_that_cannot_go_back_so_far_gets_the_state_like_a_newcomer(model_cache):
    run = Run(model_cache, keep_states=4)
    run.rollback.note_copies(PRESENT, 0)
    run.rollback.note_copies(HEIRS, 5)

    assert run.rollback.without_young_copies(HEIRS, 5, EVERYBODY) == HEIRS
    assert run.rollback.without_young_copies(HEIRS, 4, EVERYBODY) == Assignment(HEIRS.holders, {})
    assert run.rollback.without_young_copies(None, 4, EVERYBODY) is None


def test_of_a_holder_that_cannot_go_back_so_far_the_shadow_takes_the_place(model_cache):
    run, moved = Run(model_cache, keep_states=4), Assignment({**HEIRS.holders, 1: "worker-9"}, {1: SHADOW})
    run.rollback.note_copies(PRESENT, 0)
    run.rollback.note_copies(moved, 5)

    former = run.rollback.without_young_copies(moved, 4, EVERYBODY)

    assert (former.holders[1], former.shadows) == (SHADOW, {})
    with pytest.raises(NoHolderError, match="stage 1: no copy that is left goes back to step 4"):
        run.rollback.without_young_copies(moved, 4, (OWNER, "worker-9"))
