"""The learning rate of a step, as a pure function; nothing to save, nothing to resume."""

from phalanx.errors import TrainingError
from phalanx.optimizers.config import OptimizerConfig
from phalanx.optimizers.decays import DECAYS


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of one step: linear warm-up, then what the schedule says.

    Args:
        config: Peak, warm-up and schedule.
        step: Counts from 0; the first step of a warm-up of n has ``lr / n``, the n-th ``lr``.
        total_steps: Of the run; the last one, and any later, has ``min_lr_ratio * lr`` unless the rate is constant.

    Raises:
        TrainingError: `step` is negative or `total_steps` is not positive.
    """
    if step < 0 or total_steps < 1:
        raise TrainingError(f"learning rate: step {step} of {total_steps}; expected a step from 0 of at least 1")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    decay, start = DECAYS[config.schedule], config.warmup_steps
    if decay.is_late:
        start = max(start, total_steps - 1 - max(1, round(config.decay_share * total_steps)))
    if decay.share is None or step < start:
        return config.lr
    progress = min(1.0, (step - start) / max(1, total_steps - 1 - start))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay.share(progress))
