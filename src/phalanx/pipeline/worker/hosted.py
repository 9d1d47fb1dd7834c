"""One stage that this party serves: its schedule, what it received, what it sent."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.engine import StepInputs
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.schedules import Action, actions
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.stage.runner import StageRunner
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.transport import SignedHeader

Slot = tuple[int, Direction, int]
"""(step, direction, microbatch) of a message into this stage."""


@dataclass
class SentTensor:
    """A tensor that was sent; kept until the step is decided, so that it can be fetched."""

    tensor: Tensor
    header: SignedHeader | None


@dataclass
class HostedStage:
    """A copy of a stage that takes part in the step; it runs an action as soon as its input is there."""

    plan: StepPlan
    copy: StageCopy
    inputs: dict[Slot, Tensor] = field(default_factory=dict)
    headers: dict[Slot, SignedHeader] = field(default_factory=dict)
    withheld: set[Slot] = field(default_factory=set)
    """Received, but not to be used before an audit has cleared it."""
    sent: dict[tuple[Direction, int], SentTensor] = field(default_factory=dict)
    past: dict[int, dict[tuple[Direction, int], SentTensor]] = field(default_factory=dict)
    """What was sent in earlier steps, as long as they can be replayed or audited."""
    losses: list[float] = field(default_factory=list)
    step: int = -1
    batch: StepInputs | None = None
    pending_apply: float | None = None
    weights_due: bool = False
    """Updated, and the shadow is to be sent the new weights, or the whole state, and has not been."""
    gradients: dict[str, Tensor] | None = None
    _todo: list[Action] = field(default_factory=list)

    @property
    def runner(self) -> StageRunner:
        """Runs the copy's microbatches."""
        return self.copy.runner

    @property
    def index(self) -> int:
        """The stage's number."""
        return self.copy.spec.index

    def begin(self, step: int, batch: StepInputs | None = None) -> None:
        """Start a step, or start it again; inputs of later steps that came early, and of one that lags, are kept."""
        self.runner.abandon()
        if self.plan.guard.undoable_steps:
            self._keep_sent(step)
        self.step, self.batch, self.gradients = step, batch, None
        self.sent.clear()
        self.losses.clear()
        for kept in (self.inputs, self.headers):
            for slot in [slot for slot in kept if slot[0] < step - self.plan.guard.commit_lag]:
                del kept[slot]
        order = actions(self.plan.schedule, self.index, len(self.plan.stages), self.plan.microbatches)
        self._todo = list(reversed(order))

    def _keep_sent(self, step: int) -> None:
        if self.step >= 0 and step > self.step:
            self.past[self.step] = dict(self.sent)
        kept = range(step - self.plan.guard.undoable_steps, step)
        self.past = {number: sent for number, sent in self.past.items() if number in kept}

    def sent_in(self, step: int) -> dict[tuple[Direction, int], SentTensor]:
        """Return the tensors sent in a step, as far as they are kept."""
        return self.sent if step == self.step else self.past.get(step, {})

    def discard_inputs(self) -> None:
        """Forget every message and what is left of the step: the epoch has changed, nothing runs before `begin`."""
        self.runner.abandon()
        if self.plan.guard.undoable_steps and 0 <= self.step < self.copy.step:
            self._keep_sent(self.step + 1)
        self.step, self.batch, self.weights_due = -1, None, False
        self._todo.clear()
        self.sent.clear()
        self.inputs.clear()
        self.headers.clear()
        self.withheld.clear()

    @property
    def finished(self) -> bool:
        """Whether every microbatch of the step has gone both ways."""
        return self.step >= 0 and not self._todo

    def ready(self) -> bool:
        """Whether the next action has its input and the optimizer is up to date."""
        if not self._todo or self.pending_apply is not None or self.copy.step != self.step:
            return False
        direction, microbatch = self._todo[-1]
        if (direction == "forward" and self.copy.spec.is_first) or (direction == "backward" and self.copy.spec.is_last):
            return self.batch is not None
        slot = (self.step, direction, microbatch)
        return slot in self.inputs and slot not in self.withheld

    def run_next(self) -> tuple[Action, Tensor | None]:
        """Run the next action.

        Returns:
            The action and the tensor to send on, None where the pipeline ends.
        """
        action = self._todo.pop()
        if action.direction == "forward":
            return action, self._forward(action.microbatch)
        gradient = None if self.copy.spec.is_last else self.inputs[(self.step, "backward", action.microbatch)]
        result = self.runner.backward(self.step, action.microbatch, gradient)
        return action, result

    def _forward(self, microbatch: int) -> Tensor | None:
        spec = self.copy.spec
        if spec.is_first and self.batch is not None:
            x = self.batch.ids[microbatch]
        else:
            x = self.inputs[(self.step, "forward", microbatch)]
        y = self.runner.forward(self.step, microbatch, x)
        if not spec.is_last:
            return y
        if self.batch is not None:
            batch = self.batch
            loss = self.runner.loss(
                microbatch,
                batch.labels[microbatch],
                batch.num_targets,
                batch.extras_of(microbatch),
                self.plan.objective,
            )
            self.losses.append(loss)
        return None


def all_finite(tensors: dict[str, Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
