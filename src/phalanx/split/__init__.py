"""Secure split fine-tuning: a client's frozen front, and an enclave with the back part, adapters, head and optimizer.

The config is there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.split.config import ENCLAVE as ENCLAVE, SplitConfig as SplitConfig

if TYPE_CHECKING:
    from phalanx.split.channel.client_order import microbatches_of as microbatches_of
    from phalanx.split.channel.tensor_kinds import TensorKinds as TensorKinds
    from phalanx.split.roles.driver import SplitDriver as SplitDriver, SplitStep as SplitStep
    from phalanx.split.training.classification import Classification as Classification, HeldOutScores as HeldOutScores
    from phalanx.split.training.parts import (
        Front as Front,
        FrontPart as FrontPart,
        build_back as build_back,
        cut_model as cut_model,
    )
    from phalanx.split.training.task import kinds_of_task as kinds_of_task, task_of as task_of
    from phalanx.split.training.trainer import BackTrainer as BackTrainer


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
