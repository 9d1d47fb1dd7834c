"""The arms of the tables: one file each, all with the interface of `Arm`, listed in one table."""

from collections.abc import Callable
from types import MappingProxyType

from phalanx.lab.reproduce.arms.arm import Arm as Arm
from phalanx.lab.reproduce.arms.arm import ArmInputs as ArmInputs
from phalanx.lab.reproduce.arms.skip_layer import SkipLayerArm
from phalanx.lab.reproduce.arms.statistics import StatisticsArm
from phalanx.lab.reproduce.arms.undefended import UndefendedArm
from phalanx.lab.reproduce.arms.verified import VerifiedArm
from phalanx.engine import StepInputs
from phalanx.errors import TrainingError
from phalanx.lab.reproduce.arms.duplicates import DuplicatingArm


class OracleDrop(UndefendedArm):
    """An upper bound on a perfect detector with the cheapest recovery; the batch is lost."""

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Run the step unless a stage would lie in it."""
        if self.attacker.lying_stage_at(step) is not None:
            self.event_counts.dropped_steps += 1
            return
        super().step_arm(step, inputs)


MAX_ATTEMPTS = 200
"""Attempts at one step, all of them attacked, after which it gives up."""


class RestartArm(DuplicatingArm):
    """A defence that repeats each step until no stage lies in it.

    The attacker draws again for each attempt, and is never excluded.

    Source: Lu et al. 2023, section 6.1.
    """

    def step_arm(self, step: int, inputs: StepInputs) -> None:
        """Run attempts at the step until one is honest, then apply its update."""
        self.attacker.attempt = 0
        while self.find_suspect(step, inputs) is not None:
            self.abandon_attempt()
            self.attacker.attempt += 1
            if self.attacker.attempt == MAX_ATTEMPTS:
                raise TrainingError(
                    f"step {step}: attacked in {MAX_ATTEMPTS} attempts in a row; restart never ends at this rate"
                )
        self.apply_gradients(step)


ARMS: MappingProxyType[str, Callable[[ArmInputs], Arm]] = MappingProxyType(
    {
        "clean": UndefendedArm,
        "clean_early_stopping": UndefendedArm,
        "attacked": UndefendedArm,
        "oracle_drop": OracleDrop,
        "restart": RestartArm,
        "skip_layer": SkipLayerArm,
        "statistics": StatisticsArm,
        "phalanx": VerifiedArm,
        "phalanx_no_attacker": VerifiedArm,
    }
)
"""Every arm in the order of the tables; whether there is an attacker is in its setting."""

HONEST = frozenset({"clean", "clean_early_stopping", "phalanx_no_attacker"})
"""Arms without an attacker."""
