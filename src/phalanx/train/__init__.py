"""From a run file to a trained model: the loop and everything that it joins."""

import sys
from types import ModuleType
from typing import Any

from phalanx.train.config import RunConfig, TrainConfig, load_run
from phalanx.train.loop import Engine, run_loop, step_inputs
from phalanx.train.session import describe, train

__all__ = ["Engine", "RunConfig", "TrainConfig", "describe", "load_run", "run_loop", "step_inputs", "train"]


class _Callable(ModuleType):
    """Lets ``phalanx.train(run)`` work although ``phalanx.train`` is this package as well."""

    def __call__(self, run: RunConfig, *arguments: Any, resume: bool = False) -> dict[str, Any]:
        return train(run, *arguments, resume=resume)


sys.modules[__name__].__class__ = _Callable
