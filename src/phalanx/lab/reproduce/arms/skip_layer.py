"""The paper's second recovery: leave the two suspects out, freeze them and their predecessor, go on.

On an alarm about stage i the culprit may be i, or i + 1 which accuses it. The whole forward pass of the step runs
again with the activation of i - 1 going straight to i + 2; the weights of i - 1, i and i + 1 stay as they are in this
step. The last stage is trusted and has the head: it is never left out and never frozen.

Source: Lu et al. 2023, section 6.3. Their release differs from their text at both ends of the pipeline: see
docs/reproduction.md.
"""

from phalanx.engine import StepInputs
from phalanx.errors import TrainingError
from phalanx.lab.reproduce.arms.arm import ArmInputs
from phalanx.lab.reproduce.arms.duplicates import DuplicateCheck
from phalanx.lab.reproduce.arms.undefended import SimulatedArm
from phalanx.lab.reproduce.simulator import AlarmRaised


def skipped_and_frozen(suspect: int, num_stages: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the stages that are skipped after an alarm about one, and the frozen stages."""
    last = {num_stages - 1}
    return frozenset({suspect, suspect + 1} - last), frozenset({suspect - 1, suspect, suspect + 1} - last)


class SkipLayerArm(SimulatedArm):
    """The paper's second recovery, faithful to its text, with a detector that really recomputes."""

    def __init__(self, setting: ArmInputs) -> None:
        super().__init__(setting)
        self.duplicates = DuplicateCheck(setting.source, setting.plan)
        self.event_counts.alarms = self.event_counts.honest_accused = self.event_counts.lies_missed = 0

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Run one attempt; on an alarm run a second one without the suspects.

        Raises:
            TrainingError: Another stage lies in the second attempt; the paper has no answer to that.
        """
        suspect = self._first_attempt(step, inputs)
        frozen: frozenset[int] = frozenset()
        if suspect is not None:
            frozen = self._attempt_without(step, inputs, suspect)
        simulator = self.simulator
        gradients = {
            stage: gradients_of_stage
            for stage, gradients_of_stage in simulator.take_gradients().items()
            if stage not in frozen
        }
        clip = simulator.combined_clip(gradients)
        simulator.update_copies(step, gradients, clip)
        self.duplicates.update_duplicates(gradients, simulator.learning_rate(step), clip)

    def _first_attempt(self, step: int, inputs: StepInputs) -> int | None:
        liar, counts = self.attacker.lying_stage_at(step), self.event_counts
        self.duplicates.idle = ()
        try:
            self.simulator.run_attempt(step, inputs, self.duplicates)
        except AlarmRaised as alarm:
            counts.alarms = (counts.alarms or 0) + 1
            counts.honest_accused = (counts.honest_accused or 0) + (alarm.suspect != liar)
            return alarm.suspect
        if liar is not None:
            counts.lies_missed = (counts.lies_missed or 0) + len(inputs.ids)
        return None

    def _attempt_without(self, step: int, inputs: StepInputs, suspect: int) -> frozenset[int]:
        simulator, duplicates = self.simulator, self.duplicates
        simulator.abandon_attempt()
        duplicates.drop_all_graphs()
        self.event_counts.redone_steps += 1
        bypassed, frozen = skipped_and_frozen(suspect, len(simulator.plan.stages))
        duplicates.idle = frozen
        try:
            simulator.run_attempt(step, inputs, duplicates, bypassed=bypassed)
        except AlarmRaised as alarm:
            raise TrainingError(
                f"step {step}: stage {alarm.suspect} lies as well as stage {suspect}; skip_layer knows one liar a step"
            ) from alarm
        return frozen
