"""The paper's first recovery: on an alarm of the duplicated block the whole iteration runs again."""

from phalanx.engine import StepInputs
from phalanx.errors import TrainingError
from phalanx.lab.reproduce.arms.arm import ArmInputs
from phalanx.lab.reproduce.arms.duplicates import DuplicateCheck
from phalanx.lab.reproduce.arms.undefended import SimulatedArm
from phalanx.lab.reproduce.simulator import AlarmRaised

MAX_ATTEMPTS = 200
"""Attempts at one step, all of them attacked, after which it gives up."""


class RestartArm(SimulatedArm):
    """A defence that repeats each step until no stage lies in it.

    The attacker draws again for each attempt, and is never excluded.

    Source: Lu et al. 2023, section 6.1.
    """

    def __init__(self, setting: ArmInputs) -> None:
        super().__init__(setting)
        self.duplicates = DuplicateCheck(setting.source, setting.plan)
        self.event_counts.alarms = self.event_counts.honest_accused = self.event_counts.lies_missed = 0

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Run attempts at the step until one is honest, then apply its update.

        Raises:
            TrainingError: No honest attempt came.
        """
        simulator, duplicates = self.simulator, self.duplicates
        self.attacker.attempt = 0
        while not self._attempt_step(step, inputs):
            simulator.abandon_attempt()
            duplicates.drop_all_graphs()
            self.attacker.attempt += 1
            self.event_counts.redone_steps += 1
            if self.attacker.attempt == MAX_ATTEMPTS:
                raise TrainingError(
                    f"step {step}: attacked in {MAX_ATTEMPTS} attempts in a row; restart never ends at this rate"
                )
        gradients = simulator.take_gradients()
        clip = simulator.combined_clip(gradients)
        simulator.update_copies(step, gradients, clip)
        duplicates.update_duplicates(gradients, simulator.learning_rate(step), clip)

    def _attempt_step(self, step: int, inputs: StepInputs) -> bool:
        liar, counts = self.attacker.lying_stage_at(step), self.event_counts
        try:
            self.simulator.run_attempt(step, inputs, self.duplicates)
        except AlarmRaised as alarm:
            counts.alarms = (counts.alarms or 0) + 1
            counts.honest_accused = (counts.honest_accused or 0) + (alarm.suspect != liar)
            return False
        if liar is not None:
            counts.lies_missed = (counts.lies_missed or 0) + len(inputs.ids)
        return True
