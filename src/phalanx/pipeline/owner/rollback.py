"""The rollback (L5): how far the run goes back after a conviction, and what is then done again."""

from collections.abc import Sequence

from phalanx.engine import StepInputs
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.owner.replay import Replay
from phalanx.pipeline.owner.step_history import PastStep, StepHistory, slim
from phalanx.pipeline.protocol.needs import task
from phalanx.pipeline.stage.kept_points import points_before
from phalanx.pipeline.verify.facts import StepFacts


class Rollback:
    """The rollback knows how far back each copy reaches, and remembers what is needed to go there.

    Attributes:
        undone: Batches of steps that were undone and are to be done again, by step.
    """

    def __init__(self, facts: StepFacts) -> None:
        self.undone: dict[int, StepInputs] = {}
        self._facts = facts
        guard = facts.plan.guard
        steps = max(guard.undoable_steps, 2 * guard.keep_states + 1 if guard.keep_states else 0)
        self._step_history = StepHistory(guard.snapshot_every if guard.keeps_snapshots else steps)
        self._replay = Replay(facts, self._step_history)
        self._since: dict[tuple[str, int], int] = {}
        self._begin: int | None = None
        self._snapshot = 0
        """Step of the last snapshot that every party is known to have, where they keep such."""

    def remember(self, step: PastStep) -> None:
        """Keep a step that is about to be applied."""
        # nothing is replayed where states are kept: of hundreds of steps, their headers are let go of
        self._step_history.add(slim(step) if self._facts.plan.guard.keep_states else step)
        if self._facts.plan.guard.hands_on(step.ledger.step):
            self._snapshot = step.ledger.step

    def last_snapshot(self, step: int, *, convicted: bool) -> int | None:
        """Where to go back to before roles change: the last snapshot that all have; None when that is this very step.

        One that has just been handed over will do after a loss; it may hold what a party was convicted for.
        """
        facts = self._facts
        is_whole = facts.plan.guard.hands_on(step) and facts.agreed.keys() >= set(facts.watched)
        return None if self._snapshot == step or (is_whole and not convicted) else self._snapshot

    def is_turning_point(self, step: int) -> bool:
        """Whether roles can change here without going back; with snapshots only where all have the present one."""
        return not self._facts.plan.guard.keeps_snapshots or self.last_snapshot(step, convicted=False) is None

    @task
    async def first_bad_step(self, stages: Sequence[int], new: Assignment, gone: str) -> int | None:
        """Replay what a convicted party did in the kept steps; as far back as every stage has a copy so old.

        A step that lags counts as bad without a replay. Where states are kept in place of steps, whatever the party did
        since the older one counts as bad.
        """
        if self._facts.plan.guard.keep_states:
            found = [bad for bad in (self._kept_point(new, gone), self.unverified) if bad is not None]
            return min(found) if found else None
        if not self._facts.plan.guard.keep_steps:
            return self.unverified
        reach = max((self._oldest_copy(stage, new, gone) for stage in new.holders), default=0)
        successors = {stage: new.holders[stage] for stage in stages}
        replayed = [
            await self._replay.first_bad_step(
                stage, successor, max(reach, self._since.get((successor, stage), 0)), gone
            )
            for stage, successor in successors.items()
        ]
        found = [bad for bad in (*replayed, self.unverified) if bad is not None]
        return min(found) if found else None

    def _kept_point(self, new: Assignment, gone: str) -> int | None:
        """The last kept state of before the party had a part in the run; else the oldest that every holder has."""
        step, every = self._facts.ledger.step, self._facts.plan.guard.keep_states
        oldest = max((self._since.get((party, stage), step) for stage, party in new.holders.items()), default=step)
        known = [point for point in points_before(step, self._begin or 0, every) if point >= oldest]
        came = min((since for (party, _), since in self._since.items() if party == gone), default=0)
        return max((point for point in known if point <= came), default=min(known, default=None))

    @property
    def unverified(self) -> int | None:
        """The step that was applied before its audits were done; None when every applied step is verified."""
        lagging = self._facts.lagging
        return None if lagging is None else lagging.step

    def undo(self, first_bad: int, step: int) -> None:
        """Forget every step from the first bad one on; the batches are kept to do them again."""
        step_history, facts = self._step_history, self._facts
        self.undone |= {past.ledger.step: past.inputs for past in step_history.since(first_bad)}
        back, before = step_history.get(first_bad), step_history.get(first_bad - 1)
        facts.ledger.agreed = {} if back is None else dict(back.agreed)
        facts.previous = None if before is None else before.ledger
        step_history.forget_from(first_bad)
        facts.observe("rolled_back", {"step": step, "to": first_bad})

    def old_enough(self, old: Assignment | None, step: int) -> Assignment | None:
        """The old assignment without shadows that cannot go back to `step`: they get the state like newcomers."""
        if old is None:
            return None
        if self._facts.plan.guard.keeps_snapshots:
            return old
        if self._facts.plan.guard.verify_only:
            # weights may have been on their way when roles changed: every shadow gets them anew
            return Assignment(old.holders, {})
        able = {stage: name for stage, name in old.shadows.items() if self._since.get((name, stage), 0) <= step}
        return Assignment(old.holders, able)

    def note_copies(self, new: Assignment, step: int) -> None:
        """From which step on each party has had each stage: it can go back no further."""
        self._begin = step if self._begin is None else self._begin
        pairs = {(party, stage) for roles in (new.holders, new.shadows) for stage, party in roles.items()}
        self._since = {pair: self._since.get(pair, step) for pair in pairs}
        self._snapshot = step

    def _oldest_copy(self, stage: int, new: Assignment, gone: str) -> int:
        parties = {new.holders[stage], new.shadows.get(stage)} - {gone, None}
        known = [self._since[(party, stage)] for party in parties if party and (party, stage) in self._since]
        return min(known, default=0)
