"""From a run file to a trained model: the loop and everything that it joins.

The config is there at once; what needs torch is imported at its first use.
"""

import sys
from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.train.config import (
    RUN_TYPES,
    DomainRun,
    FederatedPipelineRun,
    FederatedRun,
    GuardedRun,
    PipelineRun,
    RankedRun,
    RunConfig,
    SplitPipelineRun,
    SplitRun,
    StagedRun,
    load_run,
)
from phalanx.train.train_section import TrainConfig

if TYPE_CHECKING:
    from phalanx.train.entry import describe, follow, join_terms, plays_rank, train
    from phalanx.train.loop import step_inputs
    from phalanx.train.rate_finder import find_rate
    from phalanx.train.records.check_record import CheckRecord
    from phalanx.train.records.past_run import PastRun
    from phalanx.train.records.peers import PeersView, look_at_peers
    from phalanx.train.records.run_directory import ADDRESS_FILE, check_directory, default_directory, holds_run, is_made
    from phalanx.train.records.trust import drill_result
    from phalanx.train.saving.run_export import export_run
    from phalanx.train.setup.preflight import check_inputs, text_warnings

__all__ = [
    "ADDRESS_FILE",
    "RUN_TYPES",
    "CheckRecord",
    "DomainRun",
    "FederatedPipelineRun",
    "FederatedRun",
    "GuardedRun",
    "PastRun",
    "PeersView",
    "PipelineRun",
    "RankedRun",
    "RunConfig",
    "SplitPipelineRun",
    "SplitRun",
    "StagedRun",
    "TrainConfig",
    "check_directory",
    "check_inputs",
    "default_directory",
    "describe",
    "drill_result",
    "export_run",
    "find_rate",
    "follow",
    "holds_run",
    "is_made",
    "join_terms",
    "load_run",
    "look_at_peers",
    "plays_rank",
    "step_inputs",
    "text_warnings",
    "train",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)


# a call of this package is a matter of a floor above it, which the package around it knows
sys.modules[__name__].__class__ = sys.modules["phalanx"].TrainPackage
