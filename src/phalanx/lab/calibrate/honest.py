"""All stages of a run in one process, taking honest steps; what crosses a boundary is kept for comparison."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from phalanx.data import without_attention
from phalanx.engine import StepInputs
from phalanx.models import with_marks
from phalanx.optimizers import clip_coefficient, gradient_norm_squared
from phalanx.pipeline import StageCopy, StepPlan


@dataclass(frozen=True)
class HonestInputs:
    """The inputs from which a middle stage computes one microbatch.

    Attributes:
        x: Its input ``[batch, seq, dim]``.
        gradient: Gradient of its output ``[batch, seq, dim]``.
    """

    stage: int
    step: int
    microbatch: int
    x: Tensor
    gradient: Tensor


class HonestRun:
    """The run as it would go without processes: the same stages, batches, clipping and optimizer."""

    def __init__(self, plan: StepPlan, library: Callable[[int], StageCopy]) -> None:
        """Build every stage; `library` gives one by its number."""
        self.plan = plan
        self.copies = [library(stage) for stage in range(len(plan.stages))]

    def compute_step(self, step: int, inputs: StepInputs) -> list[HonestInputs]:
        """Run forward and backward of a step; weights change only at `update`.

        Returns:
            Every microbatch of every middle stage.
        """
        cases = []
        for m, (ids, labels) in enumerate(zip(inputs.ids, inputs.labels, strict=True)):
            extras = inputs.extras_of(m)
            entering = [with_marks(ids, extras)]
            for copy in self.copies:
                entering.append(copy.runner.forward(step, m, entering[-1]))
            self.copies[-1].runner.compute_loss(m, labels, inputs.num_targets, without_attention(extras))
            gradient: Tensor | None = None
            for copy in reversed(self.copies):
                arrived, gradient = gradient, copy.runner.backward(step, m, gradient)
                if arrived is not None and gradient is not None:
                    cases.append(HonestInputs(copy.spec.index, step, m, entering[copy.spec.index], arrived))
        return cases

    def update_stages(self, step: int) -> None:
        """Let every stage's optimizer take the step."""
        gradients = [copy.runner.take_gradients() for copy in self.copies]
        norm = math.sqrt(sum(gradient_norm_squared(part) for part in gradients))
        coefficient = clip_coefficient(norm, self.plan.optimizer.clip_norm)
        for copy, part in zip(self.copies, gradients, strict=True):
            copy.apply_update(step, part, coefficient)
