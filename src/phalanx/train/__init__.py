"""From a run file to a trained model: the loop and everything that it joins.

The config is there at once; what needs torch is imported at its first use.
"""

import sys
from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.train.config import (
    RUN_TYPES as RUN_TYPES,
    DomainRun as DomainRun,
    FederatedRun as FederatedRun,
    GuardedRun as GuardedRun,
    PipelineRun as PipelineRun,
    RankedRun as RankedRun,
    RunConfig as RunConfig,
    SplitPipelineRun as SplitPipelineRun,
    SplitRun as SplitRun,
    StagedRun as StagedRun,
    load_run as load_run,
)
from phalanx.train.train_section import TrainConfig as TrainConfig

if TYPE_CHECKING:
    from phalanx.train.entry import (
        describe_run as describe_run,
        join_as_rank as join_as_rank,
        join_terms as join_terms,
        plays_rank as plays_rank,
        train as train,
    )
    from phalanx.train.loop import step_inputs as step_inputs
    from phalanx.train.rate_finder import find_rate as find_rate
    from phalanx.train.records.check_record import CheckRecord as CheckRecord
    from phalanx.train.records.past_run import PastRun as PastRun
    from phalanx.train.records.peers import PeersView as PeersView, look_at_peers as look_at_peers
    from phalanx.train.records.run_directory import (
        ADDRESS_FILE as ADDRESS_FILE,
        check_directory as check_directory,
        default_directory as default_directory,
        holds_run as holds_run,
        is_made as is_made,
    )
    from phalanx.train.records.trust import drill_result as drill_result
    from phalanx.train.saving.run_export import export_run as export_run, verify_run_export as verify_run_export
    from phalanx.train.setup.preflight import check_inputs as check_inputs, text_warnings as text_warnings


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)


# a call of this package is a matter of a floor above it, which the package around it knows
sys.modules[__name__].__class__ = sys.modules["phalanx"].TrainPackage
