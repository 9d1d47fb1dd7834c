"""The rollback (L5): a run goes back to before what a distrusted party did unchecked, and does all since again."""

from collections.abc import Sequence
from dataclasses import replace

from phalanx.engine import StepInputs, Verdict
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.owner.kept_states import KeptStates
from phalanx.pipeline.owner.replay import PastStep, Replay, StepHistory, slim
from phalanx.pipeline.proof.step_record import step_checks
from phalanx.pipeline.protocol.needs import task
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.worker.roles import Library
from phalanx.security.crypto import certified_name

PAST_BYTES = 2**28
"""Memory in which batches of more steps than have to be undone are remembered: 256 MiB."""


class Rollback:
    """The rollback knows how far back each copy reaches, and remembers what is needed to go there.

    Args:
        facts: The present step.
        kept: The states to go back to with `keep_states`.
        past_bytes: Memory for batches of more than the 2 `keep_states` steps that are always remembered.

    Attributes:
        undone: Batches of steps that were undone and are to be done again, by step.
        kept: The states to go back to with `keep_states`.
        distrusted: Parties that are to be replaced for what they did, and are not convicted.
        restored: The kept point that all parties are about to begin at; None where they begin with what they have.
    """

    def __init__(self, facts: StepFacts, kept: KeptStates, past_bytes: int = PAST_BYTES) -> None:
        self.undone: dict[int, StepInputs] = {}
        self.kept = kept
        self.restored: int | None = None
        self._facts = facts
        self.distrusted: set[str] = set()
        self._doubtful_before: dict[str, int] = {}
        """Of a certificate, the step before which neither its word nor its work counts."""
        guard = facts.plan.guard
        steps = max(guard.undoable_steps, int(guard.undoes_last_step), 2 * guard.keep_states)
        self._step_history = StepHistory(
            guard.snapshot_every if guard.keeps_snapshots else steps, past_bytes if guard.keep_states else 0
        )
        self._replay = Replay(facts, self._step_history)
        self._since: dict[tuple[str, int], int] = {}
        self._snapshot = 0
        """Step of the last snapshot that every party is known to have, where they keep such."""

    def remember(self, step: PastStep) -> None:
        """Keep a step that is about to be applied."""
        if self._facts.plan.guard.keep_states:
            # nothing is replayed where states are kept: of hundreds of steps, their headers are let go of
            step = replace(slim(step), checks=step_checks(self._facts))
        self._step_history.add(step)
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
    async def keep_state(self, step: int) -> tuple[str, str] | None:
        """Keep the state before a step; see `KeptStates.take`."""
        oldest = self._step_history.oldest
        return await self.kept.take(step, step if oldest is None else oldest)

    @task
    async def way_back(self, gone: str, verdict: Verdict | None, old: Assignment, new: Assignment) -> int | None:
        """Find the step that a run goes back to without a party; None where it goes on from where it is.

        Args:
            gone: The party.
            verdict: What it was convicted of; None where it was not.
            old: The assignment until now.
            new: The one without it.
        """
        step, trusted = self._facts.ledger.step, verdict is None and gone not in self.distrusted
        if verdict is None and not trusted:
            self._facts.observe("distrusted", {"party": gone, "step": step})
        if self._facts.plan.guard.keeps_snapshots:
            return self.last_snapshot(step, convicted=not trusted)
        if trusted:
            return self.unverified
        # a state is wrong because of the update before it
        refuted = verdict.step - 1 if verdict is not None and verdict.offence == "state" else None
        return await self.first_bad_step(old.held_by(gone), new, gone, refuted)

    @task
    async def first_bad_step(
        self, stages: Sequence[int], new: Assignment, gone: str, refuted: int | None = None
    ) -> int | None:
        """Find where to go back to before all that a distrusted party did and no other one has shown to be right.

        With `keep_states` that is the last kept point before its first step that no trusted party recomputed in full,
        in any life of its certificate. With `keep_steps` the kept steps of its stages are replayed, as far back as
        every stage has a copy so old. A step that lags counts as bad without either.

        Args:
            stages: What the party holds.
            new: The assignment without it.
            gone: The party.
            refuted: A step with an update that it was convicted for, even where a party had recomputed it.
        """
        if self._facts.plan.guard.keep_states:
            self._doubtful_before[certified_name(gone)] = self._facts.ledger.step
            found = [bad for bad in (self._kept_point(gone, refuted), self.unverified) if bad is not None]
            return min(found, default=None)
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

    def _kept_point(self, gone: str, refuted: int | None) -> int | None:
        doubtful = next((past for past in self._step_history.since(0) if self._is_doubtful(past, gone, refuted)), None)
        oldest = self._step_history.oldest
        if doubtful is None or oldest is None:
            return None
        point = self.kept.before(doubtful.ledger.step, oldest)
        return point if point is not None and point < self._facts.ledger.step else None

    def _is_doubtful(self, past: PastStep, gone: str, refuted: int | None) -> bool:
        """Whether a step has work of a distrusted certificate for which no trusted party stands."""
        step = past.ledger.step

        def is_distrusted(party: str) -> bool:
            return step < self._doubtful_before.get(certified_name(party), 0)

        return any(
            checks.rests_on is None or any(map(is_distrusted, checks.rests_on)) or (step == refuted and party == gone)
            for checks in past.checks.values()
            if is_distrusted(party := checks.party)
        )

    @property
    def kept_library(self) -> Library | None:
        """Builds stages as they were at the kept point that all parties are about to begin at; else None."""
        return None if self.restored is None else self.kept.library(self.restored)

    @property
    def unverified(self) -> int | None:
        """The step that was applied before its audits were done; None when every applied step is verified."""
        lagging = self._facts.lagging
        return None if lagging is None else lagging.step

    def can_undo(self, step: int) -> bool:
        """Whether an applied step is remembered, so that it can be done again."""
        return self._step_history.get(step) is not None

    def undo(self, first_bad: int, step: int) -> None:
        """Forget every step from the first bad one on; the batches are kept to do them again."""
        step_history, facts = self._step_history, self._facts
        self.undone |= {past.ledger.step: past.inputs for past in step_history.since(first_bad)}
        back, before = step_history.get(first_bad), step_history.get(first_bad - 1)
        facts.ledger.agreed = {} if back is None else dict(back.agreed)
        if first_bad != self.unverified and first_bad in self.kept:
            self.restored = first_bad
            facts.ledger.agreed |= self.kept.digests(first_bad)
        self.kept.forget_after(first_bad)
        facts.previous = None if before is None else before.ledger
        step_history.forget_from(first_bad)
        facts.observe("rolled_back", {"step": step, "to": first_bad})

    def begin_again(self, step: int) -> int:
        """Undo what no shadow can begin a step again from, in the same roles; return where all begin."""
        back = self.last_snapshot(step, convicted=False) if self._facts.plan.guard.keeps_snapshots else None
        if back is None:
            return step
        self.undo(back, step)
        return back

    def old_enough(self, old: Assignment | None, step: int) -> Assignment | None:
        """The old assignment without shadows that cannot go back to `step`: they get the state like newcomers."""
        if old is None or self.restored is not None:
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
        pairs = {(party, stage) for roles in (new.holders, new.shadows) for stage, party in roles.items()}
        known = {} if self.restored is not None else self._since
        self._since = {pair: known.get(pair, step) for pair in pairs}
        self._snapshot = step

    def _oldest_copy(self, stage: int, new: Assignment, gone: str) -> int:
        parties = {new.holders[stage], new.shadows.get(stage)} - {gone, None}
        known = [self._since[(party, stage)] for party in parties if party and (party, stage) in self._since]
        return min(known, default=0)
