"""The arms without a defence: the clean runs, which have no attacker either, and the attacked one."""

from collections.abc import Iterator

from phalanx.closing import Closeable
from phalanx.engine import StepInputs
from phalanx.lab.reproduce.arms.arm import ArmInputs, Counts
from phalanx.lab.reproduce.simulator import NoMessageCheck, Simulator
from phalanx.models import StageModule


class SimulatedArm(Closeable):
    """The base of all arms in the simulator: it holds their stages and their counts."""

    def __init__(self, setting: ArmInputs) -> None:
        self.simulator = Simulator(setting.source, setting.plan, setting.attacker)
        self.attacker = setting.attacker
        self.event_counts = Counts()

    def current_stages(self) -> Iterator[StageModule]:
        """The stages themselves, in order."""
        return iter(self.simulator.stage_modules)

    def weights_digest(self) -> str:
        """SHA-256 over all parameters by name."""
        return self.simulator.weights_digest()

    def close(self) -> None:
        self.simulator.abandon_attempt()


class UndefendedArm(SimulatedArm):
    """An arm that applies every step as it comes."""

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Run one attempt and apply its update."""
        simulator = self.simulator
        simulator.run_attempt(step, inputs, NoMessageCheck())
        gradients = simulator.take_gradients()
        simulator.update_copies(step, gradients, simulator.combined_clip(gradients))
