"""The rollback (L5): a run goes back to before what a distrusted party did unchecked, and does all since again."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from phalanx.engine import StepInputs
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.owner.kept_states import KeptStates
from phalanx.pipeline.plan import BOUNDARY_DTYPE
from phalanx.pipeline.proof.step_record import StageChecks, step_checks
from phalanx.pipeline.protocol.messages import Fetch, FetchBulk, StateDigest
from phalanx.pipeline.protocol.needs import MessageNeed, TensorsNeed, task
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.verify.facts import MessageKey, StepFacts, StepLedger
from phalanx.pipeline.worker.roles import Library
from phalanx.planner.schedules import Direction
from phalanx.security.crypto import certified_name, digest_hex
from phalanx.transport.tensors import tensor_buffers, tensor_from


@dataclass(frozen=True)
class PastStep:
    """One applied step.

    Attributes:
        ledger: What every party had committed to.
        assignment: Holders and shadows at the time.
        inputs: The owner's batch.
        checks: On whose word each stage's work rests.
    """

    ledger: StepLedger
    assignment: Assignment
    inputs: StepInputs
    checks: Mapping[int, StageChecks] = field(default_factory=dict)

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


PAST_BYTES = 2**28
"""Memory in which batches of more steps than have to be undone are remembered: 256 MiB."""
_STEP_BYTES = 2**14
"""Of what is remembered of a step beside its batch, at most as a rule."""


def _size_bytes(step: PastStep) -> int:
    inputs = step.inputs
    tensors = [*inputs.ids, *inputs.labels, *(rows for named in inputs.extras for rows in named.values())]
    return _STEP_BYTES + sum(tensor.nbytes for tensor in tensors)


class StepHistory:
    """The last applied steps, without a gap.

    Args:
        undoable_steps: At least so many.
        max_bytes: More of them where all together take no more memory than this.
    """

    def __init__(self, undoable_steps: int, max_bytes: int = 0) -> None:
        self._steps: deque[PastStep] = deque()
        self._undoable_steps = undoable_steps
        self._max_bytes = max_bytes
        self._size_bytes = 0

    def add(self, step: PastStep) -> None:
        """Remember the step that is about to be applied."""
        self._steps.append(step)
        self._size_bytes += _size_bytes(step)
        while len(self._steps) > self._undoable_steps and self._size_bytes > self._max_bytes:
            self._size_bytes -= _size_bytes(self._steps.popleft())

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
            self._size_bytes -= _size_bytes(self._steps.pop())


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

    Args:
        facts: The present step.
        kept: The states to go back to with `keep_states`.
        past_bytes: Memory for batches of more than the 2 `keep_states` steps that are always remembered.

    Attributes:
        undone: Batches of steps that were undone and are to be done again, by step.
        kept: The states to go back to with `keep_states`.
        restored: The kept point that all parties are about to begin at; None where they begin with what they have.
    """

    def __init__(self, facts: StepFacts, kept: KeptStates, past_bytes: int = PAST_BYTES) -> None:
        self.undone: dict[int, StepInputs] = {}
        self.kept = kept
        self.restored: int | None = None
        self._facts = facts
        self._distrusted: set[str] = set()
        guard = facts.plan.guard
        steps = max(guard.undoable_steps, 2 * guard.keep_states)
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
    async def first_bad_step(
        self, stages: Sequence[int], new: Assignment, gone: str, refuted: int | None = None
    ) -> int | None:
        """Find where to go back to before all that a distrusted party did and nobody else has shown to be right.

        With `keep_states` that is the last kept point before its first step that no trusted party recomputed in full,
        in any life of its certificate. With `keep_steps` the kept steps of its stages are replayed, as far back as
        every stage has a copy so old. A step that lags counts as bad without either.

        Args:
            stages: What the party holds.
            new: The assignment without it.
            gone: The party.
            refuted: A step with an update that it was convicted for, whoever had recomputed it.
        """
        if self._facts.plan.guard.keep_states:
            self._distrusted.add(certified_name(gone))
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
        is_refuted = past.ledger.step == refuted
        return any(
            checks.rests_on is None
            or not self._distrusted.isdisjoint(map(certified_name, checks.rests_on))
            or (is_refuted and checks.party == gone)
            for checks in past.checks.values()
            if certified_name(checks.party) in self._distrusted
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
