"""Secure split fine-tuning: a client's frozen front, and an enclave with the back part, adapters, head and optimizer.

The config is there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.split.config import ENCLAVE, SplitConfig

if TYPE_CHECKING:
    from phalanx.split.channel.client_order import microbatches_of
    from phalanx.split.channel.tensor_kinds import TensorKinds
    from phalanx.split.roles.driver import SplitDriver, SplitStep
    from phalanx.split.training.classification import Classification, HeldOutScores
    from phalanx.split.training.parts import Front, FrontPart, build_back, cut_model
    from phalanx.split.training.task import task_of
    from phalanx.split.training.trainer import BackTrainer


__all__ = [
    "ENCLAVE",
    "BackTrainer",
    "Classification",
    "Front",
    "FrontPart",
    "HeldOutScores",
    "SplitConfig",
    "SplitDriver",
    "SplitStep",
    "TensorKinds",
    "build_back",
    "cut_model",
    "microbatches_of",
    "task_of",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
