"""The arms of the tables: one file each, all with the interface of `Arm`, listed in one table."""

from collections.abc import Callable
from types import MappingProxyType

from phalanx.lab.reproduce.arms.arm import Arm, ArmInputs
from phalanx.lab.reproduce.arms.oracle_drop import OracleDrop
from phalanx.lab.reproduce.arms.restart import RestartArm
from phalanx.lab.reproduce.arms.skip_layer import SkipLayerArm
from phalanx.lab.reproduce.arms.statistics import StatisticsArm
from phalanx.lab.reproduce.arms.undefended import UndefendedArm
from phalanx.lab.reproduce.arms.verified import VerifiedArm

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

__all__ = ["ARMS", "HONEST", "Arm", "ArmInputs"]
