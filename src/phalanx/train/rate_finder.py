"""The learning-rate finder: a short run of its own with a rising rate, and what its losses say.

Source: Smith 2017 (learning rate range test), with its linear rise.
"""

import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.checkpoint import CheckpointConfig
from phalanx.errors import ConfigError, TrainingError
from phalanx.optimizers import OptimizerConfig
from phalanx.telemetry import read_metrics
from phalanx.train.config import RunConfig
from phalanx.train.entry import train
from phalanx.train.train_section import TrainConfig

_SMOOTHED = 0.9
"""Share of the running mean that each step leaves."""
_DIVERGED = 1.5
"""The search ends at a smoothed loss this many times the lowest one."""
_BELOW = 3.0
"""The suggestion is so many times below the rate with the lowest smoothed loss."""


@dataclass(frozen=True)
class RateReading:
    """One step of the finder.

    Attributes:
        loss: Training loss, nats; None where it is no finite number.
        smoothed: Running mean of the losses so far, without the bias of its beginning.
    """

    step: int
    lr: float
    loss: float | None
    smoothed: float | None


@dataclass(frozen=True)
class RateAdvice:
    """What the finder says.

    Attributes:
        lowest_at: Rate of the lowest smoothed loss before the losses rose for good; None without a finite loss.
        suggested: A rate to begin with; None where there is none.
        has_end: Whether the losses rose, or the run broke off: only then a rate is known that is too high.
    """

    readings: tuple[RateReading, ...]
    lowest_at: float | None
    suggested: float | None
    has_end: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return asdict(self)

    def describe_advice(self) -> str:
        """Say it in one sentence."""
        if self.suggested is None:
            return "no learning rate to suggest: no loss was finite; use a lower --to"
        if not self.has_end:
            return (
                f"the smoothed loss was lowest at the highest rate, {self.readings[-1].lr:.3g}: a higher one may "
                f"work as well; try a larger --to. Until then optimizer.lr = {self.suggested:.2g}"
            )
        return (
            f"the loss was lowest at {self.lowest_at:.3g} and then rose: start with optimizer.lr = {self.suggested:.2g}"
        )


def find_rate(run: RunConfig, highest: float | None, steps: int, console: Console) -> RateAdvice:
    """Train with a rate that rises step by step, and look at the losses.

    The run has a directory of its own, which is removed; no other one is looked at or touched.

    Args:
        highest: Rate of the last step; ten times the run file's where left out. The first has a share of 1 / `steps`.
    """
    if run.remote_workers:
        raise ConfigError(
            "pipeline.remote_workers: remote workers serve runs only; use local workers: --unset "
            "pipeline.remote_workers --unset pipeline.pki"
        )
    short = make_rising_run(run, run.optimizer.lr * 10 if highest is None else highest, steps)
    home = Path("runs")
    home.mkdir(exist_ok=True)
    # beside the runs, so that prepared text and models are shared with them
    directory = Path(tempfile.mkdtemp(prefix=".learning-rate-", dir=home))
    broke_off = False
    try:
        train(short, directory, console=console)
    except TrainingError:
        broke_off = True
    try:
        path = directory / "metrics.jsonl"
        return advice_of(read_metrics(path) if path.exists() else [], broke_off=broke_off)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def make_rising_run(run: RunConfig, highest: float, steps: int) -> RunConfig:
    """Return the short run: a linear rise up to the highest rate, and no validation or checkpoint on the way."""
    # a warm-up of the whole run is the rise; one step more, for a warm-up may not take all
    changes: dict[str, Any] = {"steps": steps + 1, "epochs": None, "validate_every": 0, "max_failed_batches": 0}
    # losses that rise with the rate are what is looked for, and no spikes to be kept away
    without = dict.fromkeys(("early_stopping", "samples", "histograms", "stability"))
    train_section = {**run.train.model_dump(), **changes, **without}
    optimizer = {
        **run.optimizer.model_dump(),
        "lr": highest,
        "warmup_steps": steps,
        "warmup_share": 0.0,
        "schedule": "constant",
    }
    optimizer["decay_share"] = OptimizerConfig.model_fields["decay_share"].default
    saved = run.checkpoint
    sections = {
        "train": TrainConfig.model_validate(train_section),
        "optimizer": OptimizerConfig.model_validate(optimizer),
        "checkpoint": CheckpointConfig(every=0, journal=False, encrypt=saved.encrypt, key=saved.key),
        "tracking": (),
        **({"evaluate": None} if "evaluate" in type(run).model_fields else {}),
    }
    try:
        return run.with_sections(sections)
    except ValueError as exc:
        raise ConfigError(f"the learning-rate finder trains {steps + 1} steps of this run, but {exc}") from exc


def advice_of(rows: Sequence[dict[str, Any]], *, broke_off: bool = False) -> RateAdvice:
    """Return the advice of the metrics.

    Args:
        broke_off: Whether the run ended because a loss was no number.
    """
    readings, mean, lowest, lowest_at, has_end = list[RateReading](), 0.0, math.inf, None, broke_off
    for number, row in enumerate(rows, start=1):
        loss = row["loss"] if isinstance(row["loss"], float) and math.isfinite(row["loss"]) else None
        if loss is None:
            has_end = True
            readings.append(RateReading(row["step"], row["lr"], None, None))
            break
        mean = _SMOOTHED * mean + (1 - _SMOOTHED) * loss
        smoothed = mean / (1 - _SMOOTHED**number)
        readings.append(RateReading(row["step"], row["lr"], loss, smoothed))
        if smoothed < lowest:
            lowest, lowest_at = smoothed, row["lr"]
        elif smoothed > _DIVERGED * lowest:
            has_end = True
            break
    has_end = has_end or (lowest_at is not None and lowest_at < 0.9 * readings[-1].lr)
    return RateAdvice(tuple(readings), lowest_at, None if lowest_at is None else lowest_at / _BELOW, has_end)
