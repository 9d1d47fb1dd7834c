"""Training inside one trust domain: data, tensor, sequence, context and pipeline parallel ranks on torch.distributed.

The config and its check are there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.parallel.config import ParallelConfig as ParallelConfig
from phalanx.parallel.elastic import fit_layout as fit_layout, list_world_sizes as list_world_sizes
from phalanx.parallel.refusal import StepWorkload as StepWorkload, check_layout as check_layout

if TYPE_CHECKING:
    from phalanx.parallel.control.local_ranks import LocalRanks as LocalRanks
    from phalanx.parallel.control.rank0 import Controller as Controller, follow_rank0 as follow_rank0
    from phalanx.parallel.control.rank_trainer import RankRecipe as RankRecipe, RankTrainer as RankTrainer
    from phalanx.parallel.control.saving import RankSaver as RankSaver
    from phalanx.parallel.data.state_dict import fallback_key as fallback_key
    from phalanx.parallel.groups.rank_env import RankEnv as RankEnv, find_place as find_place
    from phalanx.parallel.groups.rendezvous import join_ranks as join_ranks, stand_by as stand_by


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
