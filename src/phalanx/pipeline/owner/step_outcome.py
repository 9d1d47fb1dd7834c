"""The outcome of the present step: its loss, the norm of its gradient, and whether both are numbers."""

import math

from phalanx.pipeline.owner.step_result import describe_failure
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.worker.hosted import StepInputs
from phalanx.pipeline.worker.party import Party


class Outcome:
    """Reads what the owner's last stage and the commitments say.

    Args:
        docket: Has the norms that were committed to.
        owner: Has the last stage, and so the losses.
    """

    def __init__(self, docket: StepFacts, owner: Party) -> None:
        self._docket = docket
        self._owner = owner

    def mean_loss(self, inputs: StepInputs) -> float:
        """Mean over the batch's target tokens, in nats; NaN of a batch without any."""
        losses = self._owner.hosted[len(self._docket.plan.stages) - 1].losses
        return sum(losses) / inputs.num_targets if inputs.num_targets else math.nan

    def is_finite(self, inputs: StepInputs) -> bool:
        """Whether the loss and the gradient's norm are numbers."""
        return math.isfinite(self.mean_loss(inputs)) and math.isfinite(self._docket.ledger.total_norm())

    def failure(self, step: int, inputs: StepInputs) -> str:
        """What to say of a step where they are not."""
        ledger = self._docket.ledger
        return describe_failure(step, self.mean_loss(inputs), ledger.total_norm(), ledger.norms())
