"""The verified pipeline: stages that check each other, and an owner who completes every step."""

from phalanx.pipeline.allocator import keep_freed_memory
from phalanx.pipeline.battery import run_battery
from phalanx.pipeline.config import OWNER, AttackConfig, GuardConfig, PipelineConfig, WorkerConfig
from phalanx.pipeline.cusum import Drift, DriftWatch
from phalanx.pipeline.distance import Band, band, token_distance, token_distances, token_residual
from phalanx.pipeline.docket import Observe
from phalanx.pipeline.draw import AuditDraw, fresh_nonce
from phalanx.pipeline.duplicate import Duplicate
from phalanx.pipeline.engine import PipelineEngine
from phalanx.pipeline.explain import explain_evidence
from phalanx.pipeline.guarantees import GUARANTEES, weaker
from phalanx.pipeline.hosted import StepInputs
from phalanx.pipeline.join import Guests, gather
from phalanx.pipeline.kept_states import fetch_kept
from phalanx.pipeline.launch import LocalWorkers
from phalanx.pipeline.leaves import read_leaves
from phalanx.pipeline.lives import Lives
from phalanx.pipeline.log_memory import LogWitnesses
from phalanx.pipeline.members import Files, Members
from phalanx.pipeline.messages import StateDigest
from phalanx.pipeline.numeric_class import NumericClass, local_numeric_class, settle_numerics
from phalanx.pipeline.paper import MAX_ATTEMPTS, skipping
from phalanx.pipeline.plan import StageRange, StepPlan
from phalanx.pipeline.presets import PRESETS, Preset
from phalanx.pipeline.proof import Rules, Work, check_step
from phalanx.pipeline.runner import StageRunner
from phalanx.pipeline.schedules import SCHEDULES
from phalanx.pipeline.stage_copy import StageCopy, WrapCopy, stage_spec, unwrapped
from phalanx.pipeline.step_checks import CHECKS, NoteChecks, StageChecks
from phalanx.pipeline.step_record import StepRecord
from phalanx.pipeline.step_result import StepResult
from phalanx.pipeline.verdict import Verdict
from phalanx.pipeline.wide import WideRunner, recompute_in
from phalanx.pipeline.worker import Worker, born_file, die_with_parent, run_worker

__all__ = [
    "CHECKS",
    "GUARANTEES",
    "MAX_ATTEMPTS",
    "OWNER",
    "PRESETS",
    "SCHEDULES",
    "AttackConfig",
    "AuditDraw",
    "Band",
    "Drift",
    "DriftWatch",
    "Duplicate",
    "Files",
    "GuardConfig",
    "Guests",
    "Lives",
    "LocalWorkers",
    "LogWitnesses",
    "Members",
    "NoteChecks",
    "NumericClass",
    "Observe",
    "PipelineConfig",
    "PipelineEngine",
    "Preset",
    "Rules",
    "StageChecks",
    "StageCopy",
    "StageRange",
    "StageRunner",
    "StateDigest",
    "StepInputs",
    "StepPlan",
    "StepRecord",
    "StepResult",
    "Verdict",
    "WideRunner",
    "Work",
    "Worker",
    "WorkerConfig",
    "WrapCopy",
    "band",
    "born_file",
    "check_step",
    "die_with_parent",
    "explain_evidence",
    "fetch_kept",
    "fresh_nonce",
    "gather",
    "keep_freed_memory",
    "local_numeric_class",
    "read_leaves",
    "recompute_in",
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
