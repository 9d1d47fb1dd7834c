"""The verified pipeline: stages that check each other, and an owner that completes every step.

The configs are there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.pipeline.config import (
    OWNER,
    PRESETS,
    UPKEEPS,
    AttackConfig,
    GuardConfig,
    PipelineConfig,
    Preset,
    WorkerCode,
    WorkerConfig,
)
from phalanx.pipeline.party_layout import PartyLayout

if TYPE_CHECKING:
    from phalanx.pipeline.membership.callers import Callers
    from phalanx.pipeline.membership.join import ExpectedWorkers, gather
    from phalanx.pipeline.membership.members import Files, Incarnations, Members, revocation_facts
    from phalanx.pipeline.owner.context import TimeLimits
    from phalanx.pipeline.owner.engine import PipelineEngine
    from phalanx.pipeline.owner.guarantees import weaker
    from phalanx.pipeline.owner.step_books import Duplicate
    from phalanx.pipeline.plan import RowPrivacy, StageRange, StepPlan
    from phalanx.pipeline.processes.fork_server import can_fork
    from phalanx.pipeline.processes.fork_server_client import fork_here
    from phalanx.pipeline.processes.local_workers import LocalWorkers
    from phalanx.pipeline.processes.own_memory import keep_freed_memory
    from phalanx.pipeline.proof.step_proof import Rules, ShownWork, check_step
    from phalanx.pipeline.proof.step_record import CHECKS, NoteChecks, StageChecks, StepRecord, read_leaves
    from phalanx.pipeline.protocol.log_memory import LogHeadExchange, Observe
    from phalanx.pipeline.protocol.messages import StateDigest
    from phalanx.pipeline.stage.float64 import WideRunner
    from phalanx.pipeline.stage.runner import StageRunner
    from phalanx.pipeline.stage.stage_copy import StageCopy, WrapCopy, stage_spec, unwrapped
    from phalanx.pipeline.tolerance.distance import token_distance, token_distances, token_residual
    from phalanx.pipeline.tolerance.drift import DriftWatch
    from phalanx.pipeline.tolerance.numeric_class import local_numeric_class, settle_numerics
    from phalanx.pipeline.verify.draw import AuditDraw, fresh_nonce
    from phalanx.pipeline.worker.kept_states import fetch_kept
    from phalanx.pipeline.worker.narration import Narration, WorkerOutcome, keep_serving
    from phalanx.pipeline.worker.process import Worker, requested_file, run_worker
    from phalanx.pipeline.worker.roles import TrainedState

__all__ = [
    "CHECKS",
    "OWNER",
    "PRESETS",
    "UPKEEPS",
    "AttackConfig",
    "AuditDraw",
    "Callers",
    "DriftWatch",
    "Duplicate",
    "ExpectedWorkers",
    "Files",
    "GuardConfig",
    "Incarnations",
    "LocalWorkers",
    "LogHeadExchange",
    "Members",
    "Narration",
    "NoteChecks",
    "Observe",
    "PartyLayout",
    "PipelineConfig",
    "PipelineEngine",
    "Preset",
    "RowPrivacy",
    "Rules",
    "ShownWork",
    "StageChecks",
    "StageCopy",
    "StageRange",
    "StageRunner",
    "StateDigest",
    "StepPlan",
    "StepRecord",
    "TimeLimits",
    "TrainedState",
    "WideRunner",
    "Worker",
    "WorkerCode",
    "WorkerConfig",
    "WorkerOutcome",
    "WrapCopy",
    "can_fork",
    "check_step",
    "fetch_kept",
    "fork_here",
    "fresh_nonce",
    "gather",
    "keep_freed_memory",
    "keep_serving",
    "local_numeric_class",
    "read_leaves",
    "requested_file",
    "revocation_facts",
    "run_worker",
    "settle_numerics",
    "stage_spec",
    "token_distance",
    "token_distances",
    "token_residual",
    "unwrapped",
    "weaker",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
