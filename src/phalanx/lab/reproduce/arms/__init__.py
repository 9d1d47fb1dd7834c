"""What is compared: one file per arm, all of them one small interface, one table."""

from collections.abc import Callable
from types import MappingProxyType

from phalanx.lab.reproduce.arms.arm import Arm, Counts, Setting
from phalanx.lab.reproduce.arms.oracle_drop import OracleDrop
from phalanx.lab.reproduce.arms.restart import Restart
from phalanx.lab.reproduce.arms.skip_layer import SkipLayer
from phalanx.lab.reproduce.arms.statistics import Statistics
from phalanx.lab.reproduce.arms.undefended import Undefended
from phalanx.lab.reproduce.arms.verified import Verified

ARMS: MappingProxyType[str, Callable[[Setting], Arm]] = MappingProxyType(
    {
        "clean": Undefended,
        "clean_early_stopping": Undefended,
        "attacked": Undefended,
        "oracle_drop": OracleDrop,
        "restart": Restart,
        "skip_layer": SkipLayer,
        "statistics": Statistics,
        "phalanx": Verified,
        "phalanx_no_attacker": Verified,
    }
)
"""Every arm in the order of the tables; whether somebody attacks is in its setting."""

HONEST = frozenset({"clean", "clean_early_stopping", "phalanx_no_attacker"})
"""Arms in which nobody attacks."""

__all__ = ["ARMS", "HONEST", "Arm", "Counts", "Setting"]
