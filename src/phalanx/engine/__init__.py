"""The inputs and results of every engine, and the device it computes on: the floor under pipeline, domain and split.

What needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.engine.device import check_build, check_device
from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.engine.step import NO_EXTRAS, UNGUARDED, Engine, GuardReport, StepInputs, StepResult
    from phalanx.engine.verdict import Offence, Verdict

__all__ = [
    "NO_EXTRAS",
    "UNGUARDED",
    "Engine",
    "GuardReport",
    "Offence",
    "StepInputs",
    "StepResult",
    "Verdict",
    "check_build",
    "check_device",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
