"""AdamW for one stage, global-norm clipping over stages, learning-rate schedules, what optimizers keep.

The config is there at once; what needs torch is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.optimizers.config import OptimizerConfig
from phalanx.optimizers.schedule import learning_rate
from phalanx.planner.model.optimizers import moment_names, moment_shapes

if TYPE_CHECKING:
    from phalanx.optimizers.stage import StageOptimizer, clip_coefficient, expect_state, gradient_norm_squared

__all__ = [
    "OptimizerConfig",
    "StageOptimizer",
    "clip_coefficient",
    "expect_state",
    "gradient_norm_squared",
    "learning_rate",
    "moment_names",
    "moment_shapes",
]

_LATER = {
    "StageOptimizer": "phalanx.optimizers.stage",
    "clip_coefficient": "phalanx.optimizers.stage",
    "expect_state": "phalanx.optimizers.stage",
    "gradient_norm_squared": "phalanx.optimizers.stage",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module 'phalanx.optimizers' has no attribute {name!r}")
