"""The paper's second recovery: leave the two suspects out, freeze them and their predecessor, go on.

On an alarm about stage i the culprit may be i, or i + 1 which accuses it. The whole forward pass of the step runs
again with the activation of i - 1 going straight to i + 2; the weights of i - 1, i and i + 1 stay as they are in this
step. The last stage is trusted and has the head: it is never left out and never frozen.

Source: Lu et al. 2023, section 6.3. Their release differs from their text at both ends of the pipeline: see
docs/reproduction.md.
"""

from phalanx.engine import StepInputs
from phalanx.errors import TrainingError
from phalanx.lab.reproduce.arms.duplicates import DuplicatingArm
from phalanx.lab.reproduce.simulator import AlarmRaised


def skipped_and_frozen(suspect: int, num_stages: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the stages that are skipped after an alarm about one, and the frozen stages."""
    last = {num_stages - 1}
    return frozenset({suspect, suspect + 1} - last), frozenset({suspect - 1, suspect, suspect + 1} - last)


class SkipLayerArm(DuplicatingArm):
    """The paper's second recovery, faithful to its text, with a detector that really recomputes."""

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Run one attempt; on an alarm run a second one without the suspects.

        Raises:
            TrainingError: Another stage lies in the second attempt; the paper has no answer to that.
        """
        self.duplicates.idle = ()
        suspect = self.find_suspect(step, inputs)
        frozen = frozenset[int]() if suspect is None else self._attempt_without(step, inputs, suspect)
        self.apply_gradients(step, frozen)

    def _attempt_without(self, step: int, inputs: StepInputs, suspect: int) -> frozenset[int]:
        self.abandon_attempt()
        bypassed, frozen = skipped_and_frozen(suspect, len(self.simulator.plan.stages))
        self.duplicates.idle = frozen
        try:
            self.simulator.run_attempt(step, inputs, self.duplicates, bypassed=bypassed)
        except AlarmRaised as alarm:
            raise TrainingError(
                f"step {step}: stage {alarm.suspect} lies as well as stage {suspect}; skip_layer knows one liar a step"
            ) from alarm
        return frozen
