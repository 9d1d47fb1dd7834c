"""Training inside one trust domain: data, tensor, sequence, context and pipeline parallel ranks on torch.distributed.

The config and its check are there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.elastic import fitted, worlds
from phalanx.parallel.refusal import StepWorkload, check_layout

if TYPE_CHECKING:
    from phalanx.parallel.control.local_ranks import LocalRanks
    from phalanx.parallel.control.rank0 import Controller, follow
    from phalanx.parallel.control.rank_trainer import RankRecipe, RankTrainer
    from phalanx.parallel.control.saving import RankSaver
    from phalanx.parallel.data.state_dict import stand_in
    from phalanx.parallel.groups.rank_env import RankEnv, find_place
    from phalanx.parallel.groups.rendezvous import join, stand_by

__all__ = [
    "Controller",
    "LocalRanks",
    "ParallelConfig",
    "RankEnv",
    "RankRecipe",
    "RankSaver",
    "RankTrainer",
    "StepWorkload",
    "check_layout",
    "find_place",
    "fitted",
    "follow",
    "join",
    "stand_by",
    "stand_in",
    "worlds",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
