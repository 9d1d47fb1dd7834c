"""A stage in an attacker's hands: a copy that runs another runner, and a runner that stands before an honest one."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager

from torch import Tensor

from phalanx.engine import NO_EXTRAS
from phalanx.objectives import OBJECTIVES, Objective
from phalanx.pipeline import StageCopy, StageRunner


class AttackedCopy(StageCopy):
    """An attacker's copy in the place of an honest one, with its module and its optimizer."""

    def __init__(self, honest: StageCopy, runner: StageRunner | None = None) -> None:
        super().__init__(honest.plan, honest.spec, honest.module, honest.optimizer)
        self.honest = honest
        self.runner = honest.runner if runner is None else runner


class AttackedRunner(StageRunner):
    """A runner that acts like the honest runner; subclasses change single actions."""

    def __init__(self, honest: StageRunner) -> None:
        self._honest = honest
        self.module, self.spec = honest.module, honest.spec

    def forward(self, step: int, microbatch: int, x: Tensor) -> Tensor:
        return self._honest.forward(step, microbatch, x)

    def backward(self, step: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        return self._honest.backward(step, microbatch, gradient)

    def recompute_microbatch(
        self, step: int, microbatch: int, x: Tensor, gradient: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        return self._honest.recompute_microbatch(step, microbatch, x, gradient)

    def compute_loss(
        self,
        microbatch: int,
        labels: Tensor,
        num_targets: int,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
        objective: Objective = OBJECTIVES["causal_lm"],
    ) -> float:
        return self._honest.compute_loss(microbatch, labels, num_targets, extras, objective)

    def limit_gradients(self, names: Collection[str] | None) -> AbstractContextManager[None]:
        return self._honest.limit_gradients(names)

    def take_gradients(self) -> dict[str, Tensor]:
        return self._honest.take_gradients()

    def abandon_step(self) -> None:
        self._honest.abandon_step()


def honest_part(copy: StageCopy) -> StageCopy:
    """The honest copy behind an attacker's, so that a shadow that is promoted is not wrapped twice."""
    return copy.honest if isinstance(copy, AttackedCopy) else copy
