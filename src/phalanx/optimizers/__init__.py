"""AdamW for one stage, global-norm clipping over stages, learning-rate schedules, what optimizers keep.

The config is there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.optimizers.config import OptimizerConfig as OptimizerConfig, learning_rate as learning_rate
from phalanx.planner.model.optimizers import moment_names as moment_names, moment_shapes as moment_shapes

if TYPE_CHECKING:
    from phalanx.optimizers.stage import (
        StageOptimizer as StageOptimizer,
        clip_coefficient as clip_coefficient,
        expect_state as expect_state,
        gradient_norm_squared as gradient_norm_squared,
        norm_of_squares as norm_of_squares,
        torch_optimizer as torch_optimizer,
    )


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
