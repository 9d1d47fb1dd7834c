"""The configuration of a run's optimizer, and the learning rate of each step that follows from it; free of torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, one_of
from phalanx.config.strict import later_key
from phalanx.errors import TrainingError
from phalanx.planner.model.optimizers import OPTIMIZERS, foreign_settings


@dataclass(frozen=True)
class Decay:
    """The way in which a learning rate goes down from its peak.

    Attributes:
        share: Maps progress from 0 to 1, and a cosine function, to a share of the way from the least rate to the peak;
            None: the rate stays at its peak.
        is_late: Whether the rate stays at its peak until the last `decay_share` of the run's steps.
    """

    share: Callable[[float, Callable[[float], float]], float] | None
    is_late: bool = False


def _decay_linear(progress: float, cosine: Callable[[float], float]) -> float:
    return 1.0 - progress


def _decay_cosine(progress: float, cosine: Callable[[float], float]) -> float:
    return 0.5 * (1.0 + cosine(math.pi * progress))


DECAYS: dict[str, Decay] = {
    "constant": Decay(None),
    "linear": Decay(_decay_linear),
    "cosine": Decay(_decay_cosine),
    "wsd": Decay(_decay_linear, is_late=True),
}
"""By the name in a run file.

Source: Loshchilov and Hutter 2017 (cosine annealing, one period); Hu et al. 2024 (warm-up, stable, decay).
"""


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerConfig(StrictModel):
    """AdamW, SGD or Adafactor, global-norm clipping and a learning-rate schedule.

    Attributes:
        kind: A name in `OPTIMIZERS`; the support matrix (`train/runs/support.py`) has the engines that lack some.
        lr: Learning rate behind the warm-up, the largest one.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled, times the learning rate, in AdamW and Adafactor, and added to the gradient in SGD; only
            for tensors of two or more dimensions, so norms and biases are left alone.
        clip_norm: Largest Euclidean norm of the whole gradient over all stages; 1.0 when left out, and a very
            large number switches clipping off.
        warmup_steps: The learning rate rises linearly over so many steps.
        warmup_share: In place of `warmup_steps`: over this share of the run's steps.
        schedule: Decay behind the warm-up: "cosine" or "linear" down to ``min_lr_ratio * lr`` at the last step,
            "constant", or "wsd", which is constant first and then linear down to it.
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
    warmup_share: float = later_key(0.0, ge=0.0, le=0.5, allow_inf_nan=False)
    schedule: Annotated[str, one_of(DECAYS)] = "cosine"
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    decay_share: float = Field(default=0.1, gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        for name in foreign_settings(self.kind):
            if self._is_set(name):
                raise ValueError(f'{name} has no meaning with kind = "{self.kind}"; remove it')
        if not DECAYS[self.schedule].is_late and self._is_set("decay_share"):
            raise ValueError(f'decay_share has no meaning with schedule = "{self.schedule}"; remove it')
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        if self.warmup_steps and self.warmup_share:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} beside warmup_share = {self.warmup_share:g}; remove one of them"
            )
        return self

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return over how many steps of a run of this length the learning rate rises."""
        return self.warmup_steps or int(self.warmup_share * total_steps)

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)


def learning_rate(
    config: OptimizerConfig, step: int, total_steps: int, cosine: Callable[[float], float] = math.cos
) -> float:
    """Return the learning rate of one step: linear warm-up, then the schedule.

    Args:
        step: Counts from 0; the first step of a warm-up of n has ``lr / n``, the n-th ``lr``.
        total_steps: Steps of the run; the last one, and any later, has ``min_lr_ratio * lr`` unless the rate is
            constant.
        cosine: Function for angles from 0 to pi; a C library's may differ in its last bit from another's.
    """
    if step < 0 or total_steps < 1:
        raise TrainingError(f"learning rate: step {step} of {total_steps}; expected a step from 0 of at least 1")
    decay, start = DECAYS[config.schedule], config.num_warmup_steps(total_steps)
    if step < start:
        return config.lr * (step + 1) / start
    if decay.is_late:
        start = max(start, total_steps - 1 - max(1, round(config.decay_share * total_steps)))
    if decay.share is None or step < start:
        return config.lr
    progress = min(1.0, (step - start) / max(1, total_steps - 1 - start))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay.share(progress, cosine))
