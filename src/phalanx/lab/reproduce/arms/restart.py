"""The paper's first recovery: on an alarm of the duplicated block the whole iteration runs again."""

from phalanx.engine import StepInputs
from phalanx.errors import TrainingError
from phalanx.lab.reproduce.arms.arm import ArmInputs
from phalanx.lab.reproduce.arms.duplicates import DuplicateCheck
from phalanx.lab.reproduce.arms.undefended import SimulatedArm
from phalanx.lab.reproduce.simulator import AlarmRaised

MAX_ATTEMPTS = 200
"""Attempts at one step, all of them attacked, after which it gives up."""


class Restart(SimulatedArm):
    """A defence that repeats each step until no stage lies in it.

    The attacker draws again for each attempt, and is never excluded.

    Source: Lu et al. 2023, section 6.1.
    """

    def __init__(self, setting: ArmInputs) -> None:
        super().__init__(setting)
        self.duplicates = DuplicateCheck(setting.source, setting.plan)
        self.counts.alarms = self.counts.honest_accused = self.counts.lies_missed = 0

    def step(self, step: int, inputs: StepInputs) -> None:
        """Run attempts at the step until one is honest, then apply its update.

        Raises:
            TrainingError: No honest attempt came.
        """
        simulator, duplicates = self.simulator, self.duplicates
        self.attacker.attempt = 0
        while not self._succeeds(step, inputs):
            simulator.abandon()
            duplicates.abandon()
            self.attacker.attempt += 1
            self.counts.redone_steps += 1
            if self.attacker.attempt == MAX_ATTEMPTS:
                raise TrainingError(
                    f"step {step}: attacked in {MAX_ATTEMPTS} attempts in a row; restart never ends at this rate"
                )
        gradients = simulator.take_gradients()
        clip = simulator.clip(gradients)
        simulator.update(step, gradients, clip)
        duplicates.update(gradients, simulator.learning_rate(step), clip)

    def _succeeds(self, step: int, inputs: StepInputs) -> bool:
        liar, counts = self.attacker.liar(step), self.counts
        try:
            self.simulator.run(step, inputs, self.duplicates)
        except AlarmRaised as alarm:
            counts.alarms = (counts.alarms or 0) + 1
            counts.honest_accused = (counts.honest_accused or 0) + (alarm.suspect != liar)
            return False
        if liar is not None:
            counts.lies_missed = (counts.lies_missed or 0) + len(inputs.ids)
        return True
