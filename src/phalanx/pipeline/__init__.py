"""The verified pipeline: stages that check each other, and an owner that completes every step.

The configs are there at once; what needs torch is imported at its first use.
"""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.pipeline.config import (
    OWNER as OWNER,
    PRESETS as PRESETS,
    UPKEEPS as UPKEEPS,
    AttackConfig as AttackConfig,
    GuardConfig as GuardConfig,
    PipelineConfig as PipelineConfig,
    Preset as Preset,
    WorkerCode as WorkerCode,
    WorkerConfig as WorkerConfig,
)
from phalanx.pipeline.party_layout import PartyLayout as PartyLayout

if TYPE_CHECKING:
    from phalanx.pipeline.membership.callers import Callers as Callers
    from phalanx.pipeline.membership.join import ExpectedWorkers as ExpectedWorkers, admit_workers as admit_workers
    from phalanx.pipeline.membership.members import (
        Files as Files,
        Incarnations as Incarnations,
        Members as Members,
        revocation_facts as revocation_facts,
    )
    from phalanx.pipeline.owner.context import TimeLimits as TimeLimits
    from phalanx.pipeline.owner.engine import PipelineEngine as PipelineEngine
    from phalanx.pipeline.owner.guarantees import weaker_guarantee as weaker_guarantee
    from phalanx.pipeline.owner.step_log import Duplicate as Duplicate
    from phalanx.pipeline.plan import RowPrivacy as RowPrivacy, StageRange as StageRange, StepPlan as StepPlan
    from phalanx.pipeline.processes.fork_server import can_fork as can_fork
    from phalanx.pipeline.processes.fork_server_client import fork_here as fork_here
    from phalanx.pipeline.processes.local_workers import LocalWorkers as LocalWorkers
    from phalanx.pipeline.processes.own_memory import keep_freed_memory as keep_freed_memory
    from phalanx.pipeline.proof.step_proof import (
        SessionRules as SessionRules,
        ShownWork as ShownWork,
        check_step as check_step,
    )
    from phalanx.pipeline.proof.step_record import (
        CHECKS as CHECKS,
        NoteChecks as NoteChecks,
        StageChecks as StageChecks,
        StepRecord as StepRecord,
        read_leaves as read_leaves,
    )
    from phalanx.pipeline.protocol.log_memory import LogHeadExchange as LogHeadExchange, Observe as Observe
    from phalanx.pipeline.protocol.messages import StateDigest as StateDigest
    from phalanx.pipeline.stage.float64 import WideRunner as WideRunner
    from phalanx.pipeline.stage.kernel_fingerprint import class_of_session as class_of_session
    from phalanx.pipeline.stage.runner import StageRunner as StageRunner
    from phalanx.pipeline.stage.stage_copy import (
        StageCopy as StageCopy,
        WrapCopy as WrapCopy,
        stage_spec as stage_spec,
        leave_unwrapped as leave_unwrapped,
    )
    from phalanx.pipeline.tolerance.distance import (
        token_distance as token_distance,
        token_distances as token_distances,
        token_residual as token_residual,
    )
    from phalanx.pipeline.tolerance.drift import DriftWatch as DriftWatch
    from phalanx.pipeline.tolerance.numeric_class import (
        local_numeric_class as local_numeric_class,
        settle_numerics as settle_numerics,
    )
    from phalanx.pipeline.verify.draw import AuditDraw as AuditDraw, fresh_nonce as fresh_nonce
    from phalanx.pipeline.worker.kept_states import fetch_kept as fetch_kept
    from phalanx.pipeline.worker.console import (
        WorkerConsole as WorkerConsole,
        WorkerOutcome as WorkerOutcome,
        keep_serving as keep_serving,
    )
    from phalanx.pipeline.worker.process import (
        Worker as Worker,
        requested_file as requested_file,
        run_worker as run_worker,
    )
    from phalanx.pipeline.worker.roles import TrainedState as TrainedState


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
