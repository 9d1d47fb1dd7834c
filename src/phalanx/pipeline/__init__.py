"""The verified pipeline: stages that check each other, and an owner that completes every step.

The configs are there at once; what needs torch is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.pipeline.config import OWNER, AttackConfig, GuardConfig, PipelineConfig, WorkerConfig
from phalanx.pipeline.party_layout import NOT_FOR_PARTIES, PartyLayout
from phalanx.pipeline.presets import PRESETS, REMOVED_SHADOWS, Preset

if TYPE_CHECKING:
    from phalanx.pipeline.evidence.explain import explain_evidence
    from phalanx.pipeline.membership.callers import Callers
    from phalanx.pipeline.membership.incarnations import Incarnations
    from phalanx.pipeline.membership.join import ExpectedWorkers, gather
    from phalanx.pipeline.membership.members import Files, Members
    from phalanx.pipeline.owner.async_snapshot import Duplicate
    from phalanx.pipeline.owner.engine import PipelineEngine
    from phalanx.pipeline.owner.guarantees import GUARANTEES, weaker
    from phalanx.pipeline.owner.paper_recovery import MAX_ATTEMPTS, skipping
    from phalanx.pipeline.plan import StageRange, StepPlan
    from phalanx.pipeline.processes.allocator import keep_freed_memory
    from phalanx.pipeline.processes.fork_server import can_fork
    from phalanx.pipeline.processes.fork_server_client import fork_here
    from phalanx.pipeline.processes.local_workers import LocalWorkers
    from phalanx.pipeline.proof.leaves import read_leaves
    from phalanx.pipeline.proof.step_proof import Rules, ShownWork, check_step
    from phalanx.pipeline.proof.step_record import CHECKS, NoteChecks, StageChecks, StepRecord
    from phalanx.pipeline.protocol.log_memory import LogHeadExchange, Observe
    from phalanx.pipeline.protocol.messages import StateDigest
    from phalanx.pipeline.stage.battery import run_battery
    from phalanx.pipeline.stage.float64 import WideRunner, recompute_in
    from phalanx.pipeline.stage.runner import StageRunner
    from phalanx.pipeline.stage.stage_copy import StageCopy, WrapCopy, stage_spec, unwrapped
    from phalanx.pipeline.tolerance.distance import Band, band, token_distance, token_distances, token_residual
    from phalanx.pipeline.tolerance.drift import Drift, DriftWatch
    from phalanx.pipeline.tolerance.numeric_class import NumericClass, local_numeric_class, settle_numerics
    from phalanx.pipeline.verify.draw import AuditDraw, fresh_nonce
    from phalanx.pipeline.worker.kept_states import fetch_kept
    from phalanx.pipeline.worker.narration import Say, WorkerOutcome, keep_serving
    from phalanx.pipeline.worker.process import Worker, requested_file, run_worker

__all__ = [
    "CHECKS",
    "GUARANTEES",
    "MAX_ATTEMPTS",
    "NOT_FOR_PARTIES",
    "OWNER",
    "PRESETS",
    "REMOVED_SHADOWS",
    "AttackConfig",
    "AuditDraw",
    "Band",
    "Callers",
    "Drift",
    "DriftWatch",
    "Duplicate",
    "ExpectedWorkers",
    "Files",
    "GuardConfig",
    "Incarnations",
    "LocalWorkers",
    "LogHeadExchange",
    "Members",
    "NoteChecks",
    "NumericClass",
    "Observe",
    "PartyLayout",
    "PipelineConfig",
    "PipelineEngine",
    "Preset",
    "Rules",
    "Say",
    "ShownWork",
    "StageChecks",
    "StageCopy",
    "StageRange",
    "StageRunner",
    "StateDigest",
    "StepPlan",
    "StepRecord",
    "WideRunner",
    "Worker",
    "WorkerConfig",
    "WorkerOutcome",
    "WrapCopy",
    "band",
    "can_fork",
    "check_step",
    "explain_evidence",
    "fetch_kept",
    "fork_here",
    "fresh_nonce",
    "gather",
    "keep_freed_memory",
    "keep_serving",
    "local_numeric_class",
    "read_leaves",
    "recompute_in",
    "requested_file",
    "run_battery",
    "run_worker",
    "settle_numerics",
    "skipping",
    "stage_spec",
    "token_distance",
    "token_distances",
    "token_residual",
    "unwrapped",
    "weaker",
]

_HOMES = {
    "AuditDraw": "verify.draw",
    "Band": "tolerance.distance",
    "CHECKS": "proof.step_record",
    "Drift": "tolerance.drift",
    "DriftWatch": "tolerance.drift",
    "Callers": "membership.callers",
    "Duplicate": "owner.async_snapshot",
    "WorkerOutcome": "worker.narration",
    "ExpectedWorkers": "membership.join",
    "Files": "membership.members",
    "GUARANTEES": "owner.guarantees",
    "Incarnations": "membership.incarnations",
    "LocalWorkers": "processes.local_workers",
    "LogHeadExchange": "protocol.log_memory",
    "MAX_ATTEMPTS": "owner.paper_recovery",
    "Members": "membership.members",
    "NoteChecks": "proof.step_record",
    "NumericClass": "tolerance.numeric_class",
    "Observe": "protocol.log_memory",
    "PipelineEngine": "owner.engine",
    "Rules": "proof.step_proof",
    "Say": "worker.narration",
    "ShownWork": "proof.step_proof",
    "StageChecks": "proof.step_record",
    "StageCopy": "stage.stage_copy",
    "StageRange": "plan",
    "StageRunner": "stage.runner",
    "StateDigest": "protocol.messages",
    "StepPlan": "plan",
    "StepRecord": "proof.step_record",
    "WideRunner": "stage.float64",
    "Worker": "worker.process",
    "WrapCopy": "stage.stage_copy",
    "band": "tolerance.distance",
    "can_fork": "processes.fork_server",
    "check_step": "proof.step_proof",
    "explain_evidence": "evidence.explain",
    "fetch_kept": "worker.kept_states",
    "fork_here": "processes.fork_server_client",
    "fresh_nonce": "verify.draw",
    "gather": "membership.join",
    "keep_freed_memory": "processes.allocator",
    "keep_serving": "worker.narration",
    "local_numeric_class": "tolerance.numeric_class",
    "read_leaves": "proof.leaves",
    "recompute_in": "stage.float64",
    "requested_file": "worker.process",
    "run_battery": "stage.battery",
    "run_worker": "worker.process",
    "settle_numerics": "tolerance.numeric_class",
    "skipping": "owner.paper_recovery",
    "stage_spec": "stage.stage_copy",
    "token_distance": "tolerance.distance",
    "token_distances": "tolerance.distance",
    "token_residual": "tolerance.distance",
    "unwrapped": "stage.stage_copy",
    "weaker": "owner.guarantees",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"phalanx.pipeline.{_HOMES[name]}"), name)
