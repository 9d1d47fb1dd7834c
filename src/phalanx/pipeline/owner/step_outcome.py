"""The outcome of the present step: its loss, the norm of its gradient, and whether both are numbers."""

import math
from collections.abc import Mapping

from phalanx.engine import StepInputs
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.worker.party import Party


class Outcome:
    """The outcome of a step, read from the owner's last stage and the commitments.

    Args:
        facts: Has the norms that were committed to.
        owner: Has the last stage, and so the losses.
    """

    def __init__(self, facts: StepFacts, owner: Party) -> None:
        self._facts = facts
        self._owner = owner

    def mean_loss(self, inputs: StepInputs) -> float:
        """Mean over the batch's target tokens, in nats; NaN of a batch without any."""
        losses = self._owner.hosted[len(self._facts.plan.stages) - 1].losses
        return sum(losses) / inputs.num_targets if inputs.num_targets else math.nan

    def is_finite(self, inputs: StepInputs) -> bool:
        """Whether the loss and the gradient's norm are numbers."""
        return math.isfinite(self.mean_loss(inputs)) and math.isfinite(self._facts.ledger.total_norm())

    def failure(self, step: int, inputs: StepInputs) -> str:
        """Describe a step with a loss or a norm that is no number."""
        ledger = self._facts.ledger
        return _describe_failure(step, self.mean_loss(inputs), ledger.total_norm(), ledger.norms())


def _describe_failure(step: int, loss: float, norm: float, norms: Mapping[int, float | None]) -> str:
    """Say why a step came to no number; `norms`: of its gradient, squared, by stage."""
    stages = [str(stage) for stage, square in sorted(norms.items()) if square is None]
    where = f" (of stages {', '.join(stages)})" if stages else ""
    return (
        f"step {step}: loss {loss}, gradient norm {norm}{where}, and every audit agrees; "
        "lower optimizer.lr or set optimizer.clip_norm, then --resume from the last checkpoint"
    )
