"""The auditor's side of L2: gather committed inputs until a microbatch can be recomputed."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from phalanx.pipeline.protocol.messages import Audit, MessageKey, PassedOnHeader
from phalanx.planner.schedules import Direction


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
    inputs: dict[MessageKey, AuditInput] = field(default_factory=dict)

    @property
    def needed_inputs(self) -> tuple[MessageKey, ...]:
        """The messages to recompute from: the activation, and the gradient for a backward audit."""
        forward: MessageKey = (self.stage - 1, "forward", self.microbatch)
        if "backward" not in self.directions:
            return (forward,)
        return (forward, (self.stage + 1, "backward", self.microbatch))

    @property
    def has_all_inputs(self) -> bool:
        """Whether every input has arrived."""
        return all(key in self.inputs for key in self.needed_inputs)

    def input_tensor(self, direction: Direction) -> Tensor | None:
        """The input of one direction, None when it is not needed."""
        return next((self.inputs[key].tensor for key in self.needed_inputs if key[1] == direction), None)

    def input_headers(self) -> tuple[PassedOnHeader, ...]:
        """Headers of all inputs that came with one."""
        headers = (self.inputs[key].header for key in self.needed_inputs)
        return tuple(header for header in headers if header is not None)


class AuditQueue:
    """The queue of audits that this party was asked for, urgent ones first."""

    def __init__(self) -> None:
        self._tasks: list[AuditTask] = []

    def add_audit(self, audit: Audit, local: Callable[[MessageKey], AuditInput | None]) -> list[MessageKey]:
        """Queue an audit.

        Returns:
            The inputs that are not at hand and must be fetched.
        """
        missing: list[MessageKey] = []
        for microbatch in audit.microbatches:
            task = AuditTask(
                audit.step, audit.stage, microbatch, audit.directions, audit.order, audit.urgent, audit.weights
            )
            for key in task.needed_inputs:
                statement = local(key)
                if statement is not None:
                    task.inputs[key] = statement
                else:
                    missing.append(key)
            self._tasks.append(task)
        return missing

    def deliver_input(self, step: int, key: MessageKey, found: AuditInput) -> bool:
        """Hand a fetched input to the tasks that wait for it; False when none does."""
        waiting = [
            task for task in self._tasks if task.step == step and key in task.needed_inputs and key not in task.inputs
        ]
        for task in waiting:
            task.inputs[key] = found
        return bool(waiting)

    def has_audit(self, stage: int, step: int) -> bool:
        """Whether an audit of this stage and step is still to be done."""
        return any((task.stage, task.step) == (stage, step) for task in self._tasks)

    def has_drawn_audit(self, stage: int, step: int) -> bool:
        """Whether a drawn audit of this stage and step, urgent ones apart, is still to be done."""
        return any((task.stage, task.step) == (stage, step) and not task.urgent for task in self._tasks)

    def pop_ready(self, can_audit: Callable[[int, int], bool], *, urgent: bool) -> AuditTask | None:
        """Take the first task that is ready and can be done, in the order in which they were asked for.

        Microbatches of one weight gradient keep their order: another sum has other bits.

        Args:
            can_audit: Whether a stage can be audited at a step.
        """
        waiting: set[int] = set()
        for n, task in enumerate(self._tasks):
            able = task.has_all_inputs and can_audit(task.stage, task.step)
            if task.urgent == urgent and able and not (task.weights and task.stage in waiting):
                return self._tasks.pop(n)
            if task.weights:
                waiting.add(task.stage)
        return None

    def drop_tasks(self) -> None:
        """Drop everything: the epoch has changed."""
        self._tasks.clear()
