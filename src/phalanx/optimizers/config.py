"""What a run says about its optimizer; frozen, and free of torch."""

from typing import Annotated, Literal

from pydantic import Field

from phalanx.config import StrictModel

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerConfig(StrictModel):
    """AdamW, global-norm clipping and a learning-rate schedule.

    Attributes:
        lr: Peak learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, times the learning rate; only for tensors of two or more dimensions, so norms
            and biases are left alone.
        clip_norm: Largest Euclidean norm of the whole gradient over all stages; 1.0 when left out, and a very
            large number switches clipping off.
        warmup_steps: The learning rate rises linearly over so many steps.
        schedule: What follows: "cosine" down to ``min_lr_ratio * lr`` at the last step, or "constant".
        min_lr_ratio: See `schedule`.
    """

    kind: Literal["adamw"] = "adamw"
    lr: float = Field(gt=0.0, allow_inf_nan=False)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    clip_norm: float | None = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
