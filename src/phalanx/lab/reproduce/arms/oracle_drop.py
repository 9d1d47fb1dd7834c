"""A defence that the paper does not show: leave out every attacked step, told by an oracle, and do nothing else."""

from phalanx.engine import StepInputs
from phalanx.lab.reproduce.arms.undefended import UndefendedArm


class OracleDrop(UndefendedArm):
    """An upper bound on a perfect detector with the cheapest recovery; the batch is lost."""

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Run the step unless a stage would lie in it."""
        if self.attacker.lying_stage_at(step) is not None:
            self.event_counts.dropped_steps += 1
            return
        super().step_arm(step, inputs)
