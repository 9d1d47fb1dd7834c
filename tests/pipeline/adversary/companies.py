"""The small companies that an insider is put into, and how their runs are guarded."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.pipeline import AuditDraw, GuardConfig, PipelineConfig
from phalanx.pipeline.plan import Numerics
from phalanx.testing import tiny_run
from phalanx.train import PipelineRun

CERTIFIED = ("owner", "worker-1", "worker-2", "worker-3", "worker-4")
EVERYTHING = {"audit_rate": 1.0, "step_audit_rate": 1.0, "owner_audit_rate": 1.0}


class LateDraw(AuditDraw):
    """Draws by which the owner redoes every stage from one step on, and none before."""

    first = 8

    def draws_owner_audit(self, *, step, epoch, stage):
        return step >= self.first


@dataclass(frozen=True)
class Company:
    """One kind of company: the owner has the first and the last stage, workers the others.

    Attributes:
        stages: Of the model.
        workers: That are there from the start; with fewer than stages between the owner's, the first ones hold two.
        guard: Keys of the guard.
        microbatches: Of a step.
        patience_s: `pipeline.patience_s`.
        step_timeout_s: `pipeline.step_timeout_s`.
        draw: Class of the draws.
        leaves_no_doubt: Whether what a convicted party did must be undone whenever it was done.
        is_exact: Whether no lie at all may reach the weights at these rates.
        steps: Of a schedule.
        numerics: `train.numerics`.
    """

    stages: int
    workers: int
    guard: Mapping[str, Any] = field(default_factory=lambda: EVERYTHING)
    microbatches: int = 2
    patience_s: float = 1.0
    step_timeout_s: float = 60.0
    draw: type[AuditDraw] = AuditDraw
    leaves_no_doubt: bool = False
    is_exact: bool = True
    steps: int = 2
    numerics: Numerics = "float"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the workers."""
        return tuple(f"worker-{n}" for n in range(1, self.workers + 1))

    @property
    def tolerates(self) -> bool:
        """Whether parties of several numeric classes are let in, which are compared within a tolerance."""
        return self.guard.get("classes") == "mixed"

    def run(self, pki: Path) -> PipelineRun:
        """Its run file, with models and batches as small as can be."""
        pipeline = PipelineConfig(
            stages=self.stages,
            remote_workers=self.names,
            pki=str(pki),
            patience_s=self.patience_s,
            step_timeout_s=self.step_timeout_s,
        )
        run = tiny_run(pipeline=pipeline, guard=GuardConfig(**self.guard))
        sizes = {"batch_size": 2 * self.microbatches, "microbatches": self.microbatches}
        train = run.train.model_copy(update={**sizes, "numerics": self.numerics})
        return PipelineRun(**run.written | {"train": train})


COMPANIES = {
    # K = 3: the owner and two workers
    "K3": Company(4, 2),
    "K3 two stages": Company(5, 2),
    "K3 lockstep": Company(4, 2, EVERYTHING | {"shadow": "lockstep"}),
    "K3 default": Company(4, 2, {}, is_exact=False),
    "K3 patient": Company(4, 2, microbatches=8, patience_s=30.0, step_timeout_s=300.0),
    # K = 4: the owner and three workers
    "K4": Company(5, 3),
    "K4 two stages": Company(6, 3),
    "K4 two stages, default": Company(6, 3, {}, is_exact=False),
    "K4 spare": Company(4, 3),
    "K4 spare, lockstep": Company(4, 3, EVERYTHING | {"shadow": "lockstep"}),
    "K3 mixed": Company(4, 2, EVERYTHING | {"owner_audit_rate": 0.0, "classes": "mixed"}),
    "K3 exact": Company(4, 2, numerics="exact"),
    "K3 lag": Company(4, 2, EVERYTHING | {"commit_lag": 1}),
    "K4 kept": Company(
        4,
        3,
        {
            "audit_rate": 1.0,
            "step_audit_rate": 0.0,
            "owner_audit_rate": 1.0,
            "keep_states": 4,
            "gradient_screen": False,
        },
        draw=LateDraw,
        leaves_no_doubt=True,
        is_exact=False,
        steps=10,
    ),
    "K3 economy": Company(4, 2, {"preset": "economy"}, is_exact=False),
    "K4 economy, late": Company(
        4, 3, {"preset": "economy"}, draw=LateDraw, leaves_no_doubt=True, is_exact=False, steps=10
    ),
}
"""By name; a name says how many parties there are."""
