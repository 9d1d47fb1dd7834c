"""The identity in the place of a stage that is left out of an attempt: everything passes unchanged, both ways."""

from torch import Tensor

from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.stage.runner import StageRunner
from phalanx.pipeline.stage.stage_copy import StageCopy, stage_spec


class PassThrough(StageCopy):
    """A stage without parameters, for one step.

    Args:
        plan: The run.
        stage: Which stage it stands in for.
        step: The step of the attempt.
    """

    def __init__(self, plan: StepPlan, stage: int, step: int) -> None:
        self.plan, self.spec = plan, stage_spec(plan, stage)
        self.runner = _Identity()
        self._step = step

    @property
    def step(self) -> int:
        """The step that it takes part in."""
        return self._step

    def skip(self, step: int) -> None:
        """The step is over."""
        self._step = step + 1


class _Identity(StageRunner):
    def __init__(self) -> None:
        """It has no module to run."""

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        """Return the input."""
        del step, microbatch
        return x

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Return the gradient that came in."""
        del step, microbatch
        return gradient

    def gradients(self) -> dict[str, Tensor]:
        """None: there are no weights."""
        return {}

    def abandon(self) -> None:
        """Nothing is kept."""
