"""What a run says about its optimizer; frozen, and free of torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerConfig(StrictModel):
    """AdamW or SGD, global-norm clipping and a learning-rate schedule.

    Attributes:
        kind: "adamw", or "sgd" with momentum, which a run with ``[parallel]`` can have.
        lr: Peak learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        momentum: Of SGD.
        weight_decay: Decoupled, times the learning rate, in AdamW, and added to the gradient in SGD; only for tensors
            of two or more dimensions, so norms and biases are left alone.
        clip_norm: Largest Euclidean norm of the whole gradient over all stages; 1.0 when left out, and a very
            large number switches clipping off.
        warmup_steps: The learning rate rises linearly over so many steps.
        schedule: What follows: "cosine" down to ``min_lr_ratio * lr`` at the last step, or "constant".
        min_lr_ratio: See `schedule`.
    """

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(gt=0.0, allow_inf_nan=False)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    momentum: Beta = 0.9
    weight_decay: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    clip_norm: float | None = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Literal["constant", "cosine"] = "cosine"
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        foreign = ("momentum",) if self.kind == "adamw" else ("betas", "eps")
        for name in foreign:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f'{name} has no meaning with kind = "{self.kind}"; leave it out')
        return self
