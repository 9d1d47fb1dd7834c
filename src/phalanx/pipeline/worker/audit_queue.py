"""The auditor's side of L2: gather committed inputs, and weights of stages it has no copy of, and recompute."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from phalanx.errors import FrameError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Audit, Bulk, FetchBulk, PassedOnHeader, StateDigest
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.protocol.tensor_stream import BulkReceiver
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.worker.roles import PartyContext
from phalanx.pipeline.worker.stages import ShadowStage
from phalanx.planner.schedules import Direction

InputKey = tuple[int, Direction, int]
"""(source stage, direction, microbatch) of a message into the audited stage."""


@dataclass(frozen=True)
class AuditInput:
    """A tensor and the header that its sender signed."""

    tensor: Tensor
    header: PassedOnHeader | None


@dataclass
class AuditTask:
    """One microbatch of one stage; ready once all its inputs are there."""

    step: int
    stage: int
    microbatch: int
    directions: tuple[Direction, ...]
    order: int
    urgent: bool
    weights: bool = False
    inputs: dict[InputKey, AuditInput] = field(default_factory=dict)

    @property
    def needs(self) -> tuple[InputKey, ...]:
        """The messages to recompute from: the activation, and the gradient for a backward audit."""
        forward: InputKey = (self.stage - 1, "forward", self.microbatch)
        if "backward" not in self.directions:
            return (forward,)
        return (forward, (self.stage + 1, "backward", self.microbatch))

    @property
    def ready(self) -> bool:
        """Whether every input has arrived."""
        return all(key in self.inputs for key in self.needs)

    def tensor(self, direction: Direction) -> Tensor | None:
        """The input of one direction, None when it is not needed."""
        return next((self.inputs[key].tensor for key in self.needs if key[1] == direction), None)

    def headers(self) -> tuple[PassedOnHeader, ...]:
        """Headers of all inputs that came with one."""
        found = (self.inputs[key].header for key in self.needs)
        return tuple(header for header in found if header is not None)


class AuditQueue:
    """The queue of audits that this party was asked for, urgent ones first."""

    def __init__(self) -> None:
        self._tasks: list[AuditTask] = []

    def add(self, audit: Audit, local: Callable[[InputKey], AuditInput | None]) -> list[InputKey]:
        """Queue an audit.

        Returns:
            The inputs that are not at hand and must be fetched.
        """
        missing: list[InputKey] = []
        for microbatch in audit.microbatches:
            task = AuditTask(
                audit.step, audit.stage, microbatch, audit.directions, audit.order, audit.urgent, audit.weights
            )
            for key in task.needs:
                found = local(key)
                if found is not None:
                    task.inputs[key] = found
                else:
                    missing.append(key)
            self._tasks.append(task)
        return missing

    def deliver(self, step: int, key: InputKey, found: AuditInput) -> bool:
        """Hand a fetched input to the tasks that wait for it; False when none does."""
        waiting = [task for task in self._tasks if task.step == step and key in task.needs and key not in task.inputs]
        for task in waiting:
            task.inputs[key] = found
        return bool(waiting)

    def concerns(self, stage: int, step: int) -> bool:
        """Whether an audit of this stage and step is still to be done."""
        return any((task.stage, task.step) == (stage, step) for task in self._tasks)

    def has_drawn(self, stage: int, step: int) -> bool:
        """Whether a drawn audit of this stage and step, urgent ones apart, is still to be done."""
        return any((task.stage, task.step) == (stage, step) and not task.urgent for task in self._tasks)

    def pop(self, can_audit: Callable[[int, int], bool], *, urgent: bool) -> AuditTask | None:
        """Take the first task that is ready and can be done, in the order in which they were asked for.

        Microbatches of one weight gradient keep their order: another sum has other bits.

        Args:
            can_audit: Whether a stage can be audited at a step.
            urgent: Which kind of task.
        """
        waiting: set[int] = set()
        for n, task in enumerate(self._tasks):
            able = task.ready and can_audit(task.stage, task.step)
            if task.urgent == urgent and able and not (task.weights and task.stage in waiting):
                return self._tasks.pop(n)
            if task.weights:
                waiting.add(task.stage)
        return None

    def clear(self) -> None:
        """Drop everything: the epoch has changed."""
        self._tasks.clear()


@dataclass
class _FetchedStage:
    """One audit that waits for weights."""

    copy: StageCopy
    state: StateDigest
    permit: PassedOnHeader | None
    sources: list[str]
    """Parties that may still be asked."""
    incoming: BulkReceiver
    asked: str = ""
    """The party that was asked last; no other one but the owner may send parts in its place."""


class ThirdPartyAudits:
    """The weights under way for stages that the owner asked this party to audit."""

    def __init__(self, context: PartyContext) -> None:
        self._context = context
        self._open: dict[int, _FetchedStage] = {}

    def clear(self) -> None:
        """Drop everything: the epoch has changed."""
        self._open.clear()

    def permit(self, stage: int) -> PassedOnHeader | None:
        """The owner's permit, to show to a party that is asked for a tensor of this stage."""
        found = self._open.get(stage)
        return None if found is None else found.permit

    def expects(self, stage: int) -> bool:
        """Whether the owner asked for this stage to be audited from outside in the present step."""
        found = self._open.get(stage)
        return found is not None and found.state.step == self._context.roles.step

    def begin(self, received: ReceivedMessage, message: Audit, state: StateDigest) -> None:
        """Ask the shadow, if it has them, for the weights; and the stage itself if the shadow brings other ones."""
        roles, stage = self._context.roles, message.stage
        known = self._open.get(stage)
        if known is not None and known.state == state:
            # an odd message was audited in this step before
            return
        copy = roles.empty_copy(stage)
        permit = None if received.header is None else to_signed(received.header)
        holder, shadow = roles.assignment.holders.get(stage), roles.assignment.shadows.get(stage)
        has_weights = not self._context.plan.guard.keeps_snapshots
        sources = [name for name in (holder, shadow if has_weights else None) if name is not None]
        self._open[stage] = _FetchedStage(copy, state, permit, sources, BulkReceiver(copy.weights()))
        self._ask_next(stage)

    def take(self, received: ReceivedMessage, message: Bulk) -> None:
        """Take a part of the weights; once they are whole and the agreed ones, the stage can be audited.

        Raises:
            FrameError: They were not asked for, or are not those that were agreed on.
        """
        stage, roles = message.stage, self._context.roles
        fetched = self._open.get(stage)
        if (
            fetched is None
            or received.sender not in (fetched.asked, OWNER)
            or stage in roles.fetched_stages
            or fetched.state.step != roles.step
        ):
            raise FrameError(
                f"{self._context.name}: {received.sender!r} sent weights of stage {stage}, which it was not asked for"
            )
        if message.offset == 0:
            fetched.incoming = BulkReceiver(fetched.copy.weights())
        tensors = fetched.incoming.add(message.offset, message.total, received.payload)
        if tensors is None:
            return
        fetched.copy.load_weights(tensors)
        if fetched.copy.weights_digest() != fetched.state.weights:
            self._ask_next(stage)
            raise FrameError(f"{self._context.name}: {received.sender!r} sent other weights than were agreed on")
        fetched.copy.optimizer.num_steps = fetched.state.step
        roles.fetched_stages[stage] = ShadowStage(fetched.copy)

    def _ask_next(self, stage: int) -> None:
        fetched = self._open[stage]
        if fetched.sources:
            request = FetchBulk(
                epoch=self._context.roles.epoch,
                step=fetched.state.step,
                stage=stage,
                purpose="weights",
                permit=fetched.permit,
            )
            fetched.asked = fetched.sources.pop()
            self._context.post(fetched.asked, request, ())
