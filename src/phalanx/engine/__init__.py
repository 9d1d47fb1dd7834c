"""The inputs and results of every engine, and the device it computes on: the floor under pipeline, domain and split.

What needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.engine.device import check_build as check_build, check_device as check_device
from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.engine.step import (
        NO_EXTRAS as NO_EXTRAS,
        NO_LIMITS as NO_LIMITS,
        UNGUARDED as UNGUARDED,
        Engine as Engine,
        GuardReport as GuardReport,
        StepInputs as StepInputs,
        StepResult as StepResult,
        StepLimits as StepLimits,
    )
    from phalanx.engine.verdict import Offence as Offence, Verdict as Verdict


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
