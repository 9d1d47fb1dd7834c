"""The applied steps that an owner remembers, and its own replay of them to a party's first wrong one."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from phalanx.engine import StepInputs
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.plan import BOUNDARY_DTYPE
from phalanx.pipeline.proof.step_record import StageChecks
from phalanx.pipeline.protocol.messages import Fetch, FetchBulk, StateDigest
from phalanx.pipeline.protocol.needs import MessageNeed, TensorsNeed, task
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.stage_copy import StageCopy
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
        checks: The parties on which each stage's work rests.
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
