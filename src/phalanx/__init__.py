"""Phalanx: train language models on machines you do not have to trust.

    import phalanx
    run = phalanx.train("run.toml")
    run.metrics()

Importing this package loads no torch; the first use of ``train`` does.
"""

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.notebook import Run as Run, generate as generate, open_run as open_run, train as train
    from phalanx.train import load_run as load_run

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"] and sys.path[:1] == [os.getcwd()]:
    # `python -m phalanx` puts the working directory before all packages; a downloaded model there may bring a torch.py
    del sys.path[0]


class TrainPackage(ModuleType):
    """The type of ``phalanx.train``, which is a package and can be called all the same: ``phalanx.train(run)``."""

    @property
    def __call__(self) -> "Callable[..., Run]":
        """What a call of the package does."""
        from phalanx.notebook import train as train_and_open  # noqa: PLC0415 - torch is loaded when it is asked for

        return train_and_open


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
