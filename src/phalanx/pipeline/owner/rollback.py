"""The rollback (L5): applied steps are replayed to a party's first wrong one, and everything after it is done again."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from phalanx.engine import StepInputs
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.plan import BOUNDARY_DTYPE
from phalanx.pipeline.protocol.messages import Fetch, FetchBulk, StateDigest
from phalanx.pipeline.protocol.needs import MessageNeed, TensorsNeed, task
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.stage.undo_log import points_before
from phalanx.pipeline.verify.facts import MessageKey, StepFacts, StepLedger
from phalanx.planner.schedules import Direction
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers, tensor_from


@dataclass(frozen=True)
class PastStep:
    """One applied step.

    Attributes:
        ledger: What every party had committed to.
        assignment: Holders and shadows at the time.
        inputs: The owner's batch.
    """

    ledger: StepLedger
    assignment: Assignment
    inputs: StepInputs

    @property
    def agreed(self) -> Mapping[int, StateDigest]:
        """Digest of each watched stage before the step."""
        return self.ledger.agreed


def slim(step: PastStep) -> PastStep:
    """The step without the headers of its messages and the reports of its audits: what was committed to remains."""
    ledger = step.ledger
    bare = replace(
        ledger,
        commits={stage: said.model_copy(update={"received": (), "sent": ()}) for stage, said in ledger.commits.items()},
        commit_headers={},
        messages={},
        held={},
        reports={},
        awaited_audits=set(),
    )
    return replace(step, ledger=bare)


class StepHistory:
    """The last `undoable_steps` applied steps, without a gap."""

    def __init__(self, undoable_steps: int) -> None:
        self._steps: deque[PastStep] = deque(maxlen=undoable_steps)

    def add(self, step: PastStep) -> None:
        """Remember the step that is about to be applied."""
        self._steps.append(step)

    def get(self, step: int) -> PastStep | None:
        """A step that is remembered."""
        return next((past for past in self._steps if past.ledger.step == step), None)

    def since(self, step: int) -> Iterator[PastStep]:
        """The remembered steps from this one on, in order."""
        return iter([past for past in self._steps if past.ledger.step >= step])

    @property
    def oldest(self) -> int | None:
        """The first step that is remembered."""
        return self._steps[0].ledger.step if self._steps else None

    def forget_from(self, step: int) -> None:
        """Forget this step and later ones: they were undone."""
        while self._steps and self._steps[-1].ledger.step >= step:
            self._steps.pop()


_BOTH: tuple[Direction, Direction] = ("forward", "backward")


class Replay:
    """The owner's own replay; what others bring counts by the digest that was signed at the time.

    Costs one stage-step per kept step, on the owner, once per conviction.
    """

    def __init__(self, facts: StepFacts, step_history: StepHistory) -> None:
        self._facts = facts
        self._step_history = step_history

    @task
    async def first_bad_step(self, stage: int, successor: str, since: int, gone: str) -> int | None:
        """Find the first kept step of a stage that cannot be shown to be right.

        Args:
            stage: A stage of the convicted party.
            successor: Its shadow at the time; brings the state to begin from.
            since: From this step on.
            gone: The convicted party, which is asked nothing any more.

        Returns:
            The step; None when every kept step is right, or none can be replayed. The event `replayed` tells which
            steps before it were found right.
        """
        oldest = self._step_history.oldest
        if oldest is None:
            return None
        start = max(oldest, since)
        first = self._step_history.get(start)
        if first is None:
            return None
        copy = await self._state(stage, successor, start)
        if copy is None or copy.digest() != first.agreed.get(stage):
            reason = f"{successor} did not bring the agreed state of step {start}"
            self._facts.observe("not_replayed", {"stage": stage, "step": start, "reason": reason})
            return None
        found = await self._first_bad(copy, start, gone)
        end = self._facts.ledger.step if found is None else found
        if end > start:
            self._facts.observe("replayed", {"stage": stage, "party": gone, "from": start, "to": end})
        return found

    async def _first_bad(self, copy: StageCopy, start: int, gone: str) -> int | None:
        stage = copy.spec.index
        for past in self._step_history.since(start):
            if copy.digest() != past.agreed.get(stage):
                # both parties had agreed on a state that the update before does not lead to
                return past.ledger.step - 1
            gradients = await self._redo(copy, past, gone)
            if gradients is None or transfer_digest(gradients) != past.ledger.commits[stage].gradient:
                return past.ledger.step
            copy.apply(past.ledger.step, gradients, past.ledger.clip_coefficient)
        agreed = self._facts.agreed.get(stage)
        return copy.step - 1 if agreed is not None and copy.digest() != agreed else None

    async def _state(self, stage: int, successor: str, step: int) -> StageCopy | None:
        copy = StageCopy.empty(self._facts.plan, stage)
        request = FetchBulk(epoch=self._facts.ledger.epoch, step=step, stage=stage, purpose="past")
        found = await TensorsNeed(successor, request, copy.state())
        if found is None:
            return None
        copy.load(*found)
        return copy

    async def _redo(self, copy: StageCopy, past: PastStep, gone: str) -> dict[str, Tensor] | None:
        """The stage's weight gradient of one step; None when a message is wrong or an input is gone."""
        stage, step = copy.spec.index, past.ledger.step
        for m in range(copy.plan.microbatches):
            x = await self._input(past, (stage - 1, "forward", m), gone)
            gradient = await self._input(past, (stage + 1, "backward", m), gone)
            if x is None or gradient is None:
                return None
            y = copy.runner.forward(step, m, x)
            x_gradient = copy.runner.backward(step, m, gradient)
            for direction, truth in zip(_BOTH, (y, x_gradient), strict=True):
                said = past.ledger.messages[(stage, direction, m)].digest
                if truth is None or digest_hex(tensor_buffers(truth.contiguous())) != said:
                    return None
        return copy.weight_gradient(step, self._facts.noise_key(past.ledger.epoch, stage))

    async def _input(self, past: PastStep, key: MessageKey, gone: str) -> Tensor | None:
        request = Fetch.of(self._facts.ledger.epoch, past.ledger.step, key)
        party = past.assignment.holders[key[0]]
        if party == gone or party not in self._facts.present:
            return None
        answer = await MessageNeed(party, request)
        plan = self._facts.plan
        if answer is None or answer.payload.nbytes != plan.hidden_bytes:
            return None
        if digest_hex(answer.payload) != past.ledger.messages[key].digest:
            return None
        return tensor_from(answer.payload, BOUNDARY_DTYPE, plan.hidden_shape)


class Rollback:
    """The rollback knows how far back each copy reaches, and remembers what is needed to go there.

    Attributes:
        undone: Batches of steps that were undone and are to be done again, by step.
    """

    def __init__(self, facts: StepFacts) -> None:
        self.undone: dict[int, StepInputs] = {}
        self._facts = facts
        guard = facts.plan.guard
        steps = max(
            guard.undoable_steps, int(guard.undoes_last_step), 2 * guard.keep_states + 1 if guard.keep_states else 0
        )
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

    def can_undo(self, step: int) -> bool:
        """Whether an applied step is remembered, so that it can be done again."""
        return self._step_history.get(step) is not None

    def undo(self, first_bad: int, step: int) -> None:
        """Forget every step from the first bad one on; the batches are kept to do them again."""
        step_history, facts = self._step_history, self._facts
        self.undone |= {past.ledger.step: past.inputs for past in step_history.since(first_bad)}
        back, before = step_history.get(first_bad), step_history.get(first_bad - 1)
        facts.ledger.agreed = {} if back is None else dict(back.agreed)
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
