"""The inputs and results of every engine, and the device it computes on: the floor under pipeline, domain and split.

What needs torch is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.engine.device import check_build, check_device

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

_HOMES = {
    "NO_EXTRAS": "step",
    "UNGUARDED": "step",
    "Engine": "step",
    "GuardReport": "step",
    "Offence": "verdict",
    "StepInputs": "step",
    "StepResult": "step",
    "Verdict": "verdict",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(f"phalanx.engine.{_HOMES[name]}"), name)
