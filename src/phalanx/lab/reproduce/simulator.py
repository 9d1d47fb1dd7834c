"""SIMULATOR, not for training: all stages of a pipeline in one thread, with an explicit list of messages between them.

The stages, their optimizers, the loss and the clipping are the project's own; the layers between processes are left
out: transport, signatures, audits. A test holds it equal to `phalanx.testing.MemoryCompany`, bit for bit.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from phalanx.engine import StepInputs
from phalanx.lab.reproduce.attacker import Attacker, Direction
from phalanx.models import ModelSource, StageModule, weights_digest
from phalanx.optimizers import clip_coefficient, gradient_norm_squared, learning_rate
from phalanx.pipeline import StageCopy, StageRunner, StepPlan
from phalanx.train.setup.stage_source import StageLibrary


@dataclass(frozen=True)
class StageTensor:
    """One tensor on its way between two stages.

    Attributes:
        target: Stage that it is for.
        direction: "forward" for activations, "backward" for gradients.
        cause: Input of the source: the message that it had got; the jumping connection carries it.
        tensor: Sent tensor, ``[batch, seq, dim]``.
    """

    source: int
    target: int
    direction: Direction
    step: int
    microbatch: int
    cause: Tensor
    tensor: Tensor


class MessageCheck(Protocol):
    """A check of messages before they are used; it may raise `AlarmRaised`."""

    def accepts_message(self, message: StageTensor, /) -> bool:
        """Whether the message may be used; when not, its microbatch goes no further."""


class NoMessageCheck:
    """A check that accepts everything."""

    def accepts_message(self, message: StageTensor, /) -> bool:
        """True."""
        del message
        return True


class AlarmRaised(Exception):  # noqa: N818 - an event of the simulation, and no error of Phalanx
    """An alarm of a check, which stops the step; `suspect` is the stage that sent the wrong message."""

    def __init__(self, suspect: int) -> None:
        super().__init__(f"stage {suspect}")
        self.suspect = suspect


@dataclass
class StepAttempt:
    """One attempt at a step over some of the stages.

    Attributes:
        survivors: Microbatches that brought a gradient to each stage of the path.
    """

    path: tuple[int, ...]
    messages: list[StageTensor] = field(default_factory=list)
    loss_sum: float = 0.0
    survivors: dict[int, int] = field(default_factory=dict)


class Simulator:
    """A simulator that runs all stages of one run in one thread.

    Attributes:
        copies: Module, optimizer and runner of each stage; the middle ones are the attacker's.
    """

    def __init__(self, source: ModelSource, plan: StepPlan, attacker: Attacker) -> None:
        library = StageLibrary(source, plan, None)
        self.plan = plan
        self.attacker = attacker
        copies = [library(stage) for stage in range(len(plan.stages))]
        self.copies: list[StageCopy] = [
            attacker.wrapper_for(stage)(copy, True) if stage in self.middle_range else copy
            for stage, copy in enumerate(copies)
        ]

    @property
    def stage_runners(self) -> list[StageRunner]:
        """What runs each stage's microbatches."""
        return [copy.runner for copy in self.copies]

    @property
    def middle_range(self) -> range:
        """The stages that other parties hold."""
        return range(1, len(self.plan.stages) - 1)

    def run_attempt(
        self, step: int, inputs: StepInputs, watch: MessageCheck, bypassed: Collection[int] = ()
    ) -> StepAttempt:
        """Forward and backward of all microbatches.

        Args:
            bypassed: Stages that are left out; the activation passes them by, as does the gradient.

        Raises:
            AlarmRaised: The watch stopped the step; call `abandon` before the next attempt.
        """
        attempt = StepAttempt(tuple(stage for stage in range(len(self.plan.stages)) if stage not in bypassed))
        arrived = [m for m in range(len(inputs.ids)) if self._forward_microbatch(attempt, step, m, inputs, watch)]
        attempt.survivors = dict.fromkeys(attempt.path, 0)
        for microbatch in arrived:
            self._backward_microbatch(attempt, step, microbatch, watch)
        return attempt

    def take_gradients(self) -> dict[int, dict[str, Tensor]]:
        """Weight gradients of every stage; afterwards there are none."""
        return {stage: runner.take_gradients() for stage, runner in enumerate(self.stage_runners)}

    def combined_clip(self, gradients: Mapping[int, Mapping[str, Tensor]]) -> float:
        """What the gradients of these stages are multiplied by."""
        squares = [gradient_norm_squared(gradients[stage]) for stage in sorted(gradients)]
        norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
        return clip_coefficient(norm, self.plan.optimizer.clip_norm)

    def learning_rate(self, step: int) -> float:
        """Of this step."""
        return learning_rate(self.plan.optimizer, step, self.plan.total_steps)

    def update_copies(self, step: int, gradients: Mapping[int, Mapping[str, Tensor]], clip: float) -> None:
        """Let the optimizers of these stages step; the others keep weights, moments and count."""
        for stage, stage_gradients in gradients.items():
            self.copies[stage].optimizer.step(stage_gradients, self.learning_rate(step), clip)

    def abandon_attempt(self) -> None:
        """Forget graphs and gradients."""
        for runner in self.stage_runners:
            runner.abandon_step()

    @property
    def stage_modules(self) -> Sequence[StageModule]:
        """The stages, in order."""
        return [copy.module for copy in self.copies]

    def weights_digest(self) -> str:
        """SHA-256 over all parameters by name."""
        return weights_digest(
            (name, tensor.detach()) for module in self.stage_modules for name, tensor in module.all_parameters().items()
        )

    def _forward_microbatch(
        self, attempt: StepAttempt, step: int, microbatch: int, inputs: StepInputs, watch: MessageCheck
    ) -> bool:
        x = inputs.ids[microbatch]
        for index, stage in enumerate(attempt.path):
            y = self.stage_runners[stage].forward(step, microbatch, x)
            if stage == attempt.path[-1]:
                labels = inputs.labels[microbatch]
                attempt.loss_sum += self.stage_runners[stage].compute_loss(microbatch, labels, inputs.num_targets)
                break
            message = StageTensor(stage, attempt.path[index + 1], "forward", step, microbatch, x, y)
            attempt.messages.append(message)
            if not watch.accepts_message(message):
                return False
            x = y
        return True

    def _backward_microbatch(self, attempt: StepAttempt, step: int, microbatch: int, watch: MessageCheck) -> None:
        gradient: Tensor | None = None
        for index, stage in reversed(list(enumerate(attempt.path))):
            result = self.stage_runners[stage].backward(step, microbatch, gradient)
            attempt.survivors[stage] += 1
            if result is None:
                return
            # what the last stage starts from is its own loss, which it tells no other stage
            cause = result if gradient is None else gradient
            message = StageTensor(stage, attempt.path[index - 1], "backward", step, microbatch, cause, result)
            attempt.messages.append(message)
            if not watch.accepts_message(message):
                return
            gradient = result
