"""The configuration of a run's optimizer; frozen, and free of torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, one_of
from phalanx.optimizers.decays import DECAYS
from phalanx.planner.model.optimizers import OPTIMIZERS, foreign_settings

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerConfig(StrictModel):
    """AdamW, SGD or Adafactor, global-norm clipping and a learning-rate schedule.

    Attributes:
        kind: "adamw"; or, in a run with ``[parallel]``, "sgd" with momentum, or "adafactor", which keeps a row and a
            column for each matrix instead of two moments of its size.
        lr: Peak learning rate.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        momentum: Of SGD.
        weight_decay: Decoupled, times the learning rate, in AdamW and Adafactor, and added to the gradient in SGD; only
            for tensors of two or more dimensions, so norms and biases are left alone.
        clip_norm: Largest Euclidean norm of the whole gradient over all stages; 1.0 when left out, and a very
            large number switches clipping off.
        warmup_steps: The learning rate rises linearly over so many steps.
        schedule: What follows: "cosine" or "linear" down to ``min_lr_ratio * lr`` at the last step, "constant", or
            "wsd", which is constant first and then linear down to it.
        min_lr_ratio: See `schedule`.
        decay_share: Last share of the run's steps, in which "wsd" goes down.
    """

    kind: Annotated[str, one_of(OPTIMIZERS)] = "adamw"
    lr: float = Field(gt=0.0, allow_inf_nan=False)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    momentum: Beta = 0.9
    weight_decay: float = Field(default=0.1, ge=0.0, allow_inf_nan=False)
    clip_norm: float | None = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0)
    schedule: Annotated[str, one_of(DECAYS)] = "cosine"
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    decay_share: float = Field(default=0.1, gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in foreign_settings(self.kind):
            if self._is_set(name):
                raise ValueError(f'{name} has no meaning with kind = "{self.kind}"; leave it out')
        if not DECAYS[self.schedule].is_late and self._is_set("decay_share"):
            raise ValueError(f'decay_share has no meaning with schedule = "{self.schedule}"; leave it out')
        return self

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)
