"""All stages of a run in one process, taking honest steps; what crosses a boundary is kept for comparison."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.data import without_attention
from phalanx.engine import StepInputs
from phalanx.models import with_marks
from phalanx.objectives import OBJECTIVES, Objective
from phalanx.optimizers import clip_coefficient, norm_of_squares
from phalanx.pipeline import StageCopy, StepPlan
from phalanx.pipeline.stage.runner import finite_norm_squared


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
    """The run as it would go without processes: the same stages, batches, clipping and optimizer.

    Args:
        library: Builds one stage by its number.
    """

    def __init__(
        self,
        plan: StepPlan,
        library: Callable[[int], StageCopy],
        objective: Objective = OBJECTIVES["causal_lm"],
    ) -> None:
        self.plan = plan
        self.copies = [library(stage) for stage in range(len(plan.stages))]
        self._objective = objective

    def compute_step(self, step: int, inputs: StepInputs) -> list[HonestInputs]:
        """Run forward and backward of a step; weights change only at an update.

        Returns:
            Every microbatch of every middle stage.
        """
        cases = []
        last = self.copies[-1].runner
        for m, (ids, labels) in enumerate(zip(inputs.ids, inputs.labels, strict=True)):
            extras = inputs.extras_of(m)
            entering = [with_marks(ids, extras)]
            for copy in self.copies:
                entering.append(copy.runner.forward(step, m, entering[-1]))
            last.compute_loss(m, labels, inputs.num_targets, without_attention(extras), self._objective)
            gradient: Tensor | None = None
            for copy in reversed(self.copies):
                arrived, gradient = gradient, copy.runner.backward(step, m, gradient)
                if arrived is not None and gradient is not None:
                    cases.append(HonestInputs(copy.spec.index, step, m, entering[copy.spec.index], arrived))
        return cases

    def take_gradients(self) -> list[dict[str, Tensor]]:
        """Return the weight gradients of each stage, added up since the last call."""
        return [copy.runner.take_gradients() for copy in self.copies]

    def squared_norms(self, gradients: Sequence[Mapping[str, Tensor]]) -> list[float | None]:
        """Return the squared norm of each stage's gradient; None where it is not finite."""
        return [finite_norm_squared(part, self.plan.numerics) for part in gradients]

    def clip_of_norms(self, norms: Sequence[float | None]) -> float:
        """Return the clip coefficient, added up as the owner of a run does.

        Raises:
            NonFiniteLossError: A norm is not finite.
        """
        return clip_coefficient(norm_of_squares(norms), self.plan.optimizer.clip_norm)

    def apply_gradients(self, step: int, gradients: Sequence[Mapping[str, Tensor]], clip: float) -> None:
        """Let every stage's optimizer take the step."""
        for copy, part in zip(self.copies, gradients, strict=True):
            copy.apply_update(step, part, clip)

    def update_stages(self, step: int) -> None:
        """Let every stage's optimizer take the step with the gradients that were added up."""
        gradients = self.take_gradients()
        self.apply_gradients(step, gradients, self.clip_of_norms(self.squared_norms(gradients)))
