"""The section ``[privacy]`` of a run file: what its steps may spend, and how."""

from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.config.strict import later_key

Clipping = Literal["ghost", "hooks"]


class PrivacyConfig(StrictModel):
    """Differential privacy of single training rows (DP-SGD).

    Attributes:
        epsilon: Budget of the whole run; the run ends before a step that would exceed it.
        delta: The chance that the bound does not hold; below one over the number of training rows.
        clip_norm: Bound of the norm of one row's gradient, all parameters together.
        noise_multiplier: Standard deviation of the noise on a step's sum, in units of `clip_norm`; left out, the least
            one with which `train.steps` steps stay within `epsilon`.
        clipping: How norms are computed: "hooks" stores the gradient of each row, "ghost" computes their norms alone
            and runs a second backward pass.
        sampling: "poisson" draws each row of each step by itself, with a secret key, which is what makes one step
            spend little; "order" takes the loader's public order, and each step is accounted as if it had all rows.
        mean_rows: Rows that a step of a pipeline draws in the mean, of the `train.batch_size` for which it has room;
            left out, the most for which they fit but for a chance that `delta` pays for.
    """

    epsilon: float = Field(gt=0.0, le=1000.0, allow_inf_nan=False)
    delta: float = Field(gt=0.0, lt=0.1)
    clip_norm: float = Field(default=1.0, gt=0.0, le=1e6, allow_inf_nan=False)
    noise_multiplier: float | None = Field(default=None, ge=0.3, le=1e4)
    clipping: Clipping = "ghost"
    sampling: Literal["poisson", "order"] = "poisson"
    mean_rows: int | None = later_key(None, ge=1)

    @model_validator(mode="after")
    def _can_be_accounted(self) -> Self:
        if self.delta < 1e-12:
            raise ValueError(f"delta = {self.delta}: below 1e-12 the accountant's own errors are larger; raise it")
        return self
