"""Training inside one trust domain: data, tensor, sequence, context and pipeline parallel ranks on torch.distributed.

The config and its check are there at once; what needs torch is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.parallel.config import ParallelConfig
from phalanx.parallel.elastic import fitted, worlds
from phalanx.parallel.outer_config import OuterConfig
from phalanx.parallel.refusal import StepWorkload, check_layout

if TYPE_CHECKING:
    from phalanx.parallel.control.local_ranks import LocalRanks
    from phalanx.parallel.control.rank0 import Controller, follow
    from phalanx.parallel.control.rank_trainer import AppliedStep, RankRecipe, RankTrainer
    from phalanx.parallel.control.saving import RankSaver
    from phalanx.parallel.data.state_dict import stand_in
    from phalanx.parallel.groups.rank_env import RankEnv, find_place
    from phalanx.parallel.groups.rendezvous import join, stand_by

__all__ = [
    "AppliedStep",
    "Controller",
    "LocalRanks",
    "OuterConfig",
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

_HOMES = {
    "Controller": "control.rank0",
    "LocalRanks": "control.local_ranks",
    "RankTrainer": "control.rank_trainer",
    "AppliedStep": "control.rank_trainer",
    "RankEnv": "groups.rank_env",
    "RankRecipe": "control.rank_trainer",
    "RankSaver": "control.saving",
    "find_place": "groups.rank_env",
    "follow": "control.rank0",
    "join": "groups.rendezvous",
    "stand_in": "data.state_dict",
    "stand_by": "groups.rendezvous",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.parallel' has no attribute {name!r}")
    return getattr(importlib.import_module(f"phalanx.parallel.{_HOMES[name]}"), name)
