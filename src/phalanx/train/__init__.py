"""From a run file to a trained model: the loop and everything that it joins."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from phalanx.train.config import RunConfig, TrainConfig, load_run
from phalanx.train.entry import describe, follow, plays_rank, train
from phalanx.train.loop import run_loop, step_inputs
from phalanx.train.records.check_record import CheckRecord
from phalanx.train.records.past_run import PastRun
from phalanx.train.records.run_directory import ADDRESS_FILE, default_directory, holds_run

__all__ = [
    "ADDRESS_FILE",
    "CheckRecord",
    "PastRun",
    "RunConfig",
    "TrainConfig",
    "default_directory",
    "describe",
    "follow",
    "holds_run",
    "load_run",
    "plays_rank",
    "run_loop",
    "step_inputs",
    "train",
]


class _Callable(ModuleType):
    """A module type that lets ``phalanx.train(run)`` work although ``phalanx.train`` is this package as well."""

    def __call__(
        self,
        run: RunConfig,
        run_dir: str | Path | None = None,
        *,
        resume: bool = False,
        from_step: int | None = None,
        from_run: str | Path | None = None,
    ) -> dict[str, Any]:
        return train(run, run_dir, resume=resume, from_step=from_step, from_run=from_run)


sys.modules[__name__].__class__ = _Callable
