"""The rows of `bench overhead`: the cost of each guard, measured from turns and by formula."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from phalanx.lab.bench.overhead.arm import Report
from phalanx.lab.bench.overhead.overhead_arms import UNGUARDED
from phalanx.lab.bench.overhead.rows import ArmMeasurement, Row, guard_cost
from phalanx.pipeline import GuardConfig

RECOMPUTE_SHARE = 0.72
"""Forward and the backward pass to the input, as a share of all work on a microbatch; measured on CPU."""

FORMULA = "untrusted_share * (0.72 q + p)"
SCREENED_FORMULA = "untrusted_share * (q + p)"


def audited_share(guard: GuardConfig) -> float:
    """What an audited microbatch costs, as a share of all work on one; the weight gradient is part of it if seen."""
    return 1.0 if guard.screens_gradients else RECOMPUTE_SHARE


def formula_of(guard: GuardConfig) -> str | None:
    """How extra work is predicted; None where nothing is recomputed."""
    if not guard.is_enabled:
        return None
    # a copy in lock-step does everything again, the weight gradient included
    if guard.shadow_upkeep.in_lockstep:
        return "untrusted_share"
    return SCREENED_FORMULA if guard.screens_gradients else FORMULA


@dataclass(frozen=True)
class RunShape:
    """The shape of a run, as a formula needs it.

    Attributes:
        model: Name in the rows; None where a formula speaks for every model.
        untrusted_share: Their share of the model's work, by multiplications of weight matrices.
    """

    model: str | None
    stages: int
    microbatches: int
    num_untrusted: int
    untrusted_share: float
    trained_untrusted: int

    @property
    def bubble_share(self) -> float:
        """Share of a step in which a stage waits for the pipeline to fill or to empty: (K - 1) / (M + K - 1)."""
        return (self.stages - 1) / (self.microbatches + self.stages - 1)

    def fits_in_bubble(self, extra: float) -> bool:
        """Whether stages that work `extra` longer, as a share of their work, can do it while they would wait."""
        return extra * (1 - self.bubble_share) <= self.bubble_share

    def predict_extra_work(self, guard: GuardConfig) -> float | None:
        """Extra work by `formula_of` the guard: digests, signatures and the owner's own audits are not in it."""
        if not guard.is_enabled:
            return None
        rate = (
            1.0 if guard.shadow_upkeep.in_lockstep else audited_share(guard) * guard.audit_rate + guard.step_audit_rate
        )
        return self.untrusted_share * rate

    def expected_audits(self, guard: GuardConfig) -> float | None:
        """Recomputed microbatches a step in the long run; a short measurement may have had more or fewer."""
        if not guard.is_enabled:
            return None
        few = guard.audit_rate * self.microbatches
        drawn, p = few if few < 1 and not guard.min_audits else math.ceil(few), guard.step_audit_rate
        if guard.shadow_upkeep.in_lockstep:
            drawn, p = self.microbatches, 0.0
        num_audits = (1 - p) * drawn + (p + guard.owner_audit_rate) * self.microbatches
        return self.num_untrusted * num_audits


def overhead_rows(
    guards: Mapping[str, GuardConfig],
    arms: Mapping[str, ArmMeasurement],
    memory: Mapping[str, int],
    layout: RunShape,
    losses: Mapping[str, Report],
) -> list[Row]:
    """One row an arm, the unguarded one among them; its own shares are None.

    Args:
        losses: Reports of the loss of a holder, by arm; arms without one are left out.
    """
    base = arms[UNGUARDED]
    return [
        _guard_columns(guard, layout)
        | _share_columns(guard, arms[arm], base, layout)
        | {
            "extra_memory": None if arm == UNGUARDED else memory[arm] / memory[UNGUARDED] - 1,
            "memory_bytes": memory[arm],
            "recovery_s": losses[arm].recovery_s if arm in losses else None,
            "recovery_steps_redone": losses[arm].steps_redone if arm in losses else None,
        }
        | _absolute_columns(arms[arm])
        for arm, guard in guards.items()
    ]


def extrapolate_rows() -> list[Row]:
    """Formulas alone for more stages than this machine has cores for; equal stages, the first and the last trusted."""
    rows = []
    for stages in (4, 6, 8, 16, 32, 64):
        for q, p, per_stage in ((1 / 8, 1 / 32, 2), (1 / 16, 1 / 64, 2), (1 / 64, 1 / 64, 4)):
            guard = GuardConfig(audit_rate=q, step_audit_rate=p, owner_audit_rate=0.0, gradient_screen=False)
            microbatches = max(per_stage * stages, round(1 / q))
            layout = RunShape(None, stages, microbatches, stages - 2, (stages - 2) / stages, 0)
            extra = layout.predict_extra_work(guard)
            row: Row = {"K": stages, "M": microbatches, "q": q, "p": p, "formula": FORMULA}
            row |= {"predicted_extra_compute": extra, "bubble_share": layout.bubble_share}
            rows.append(row | {"fits_in_bubble": None if extra is None else layout.fits_in_bubble(extra)})
    return rows


def _guard_columns(guard: GuardConfig, layout: RunShape) -> Row:
    return {
        "model": layout.model,
        "mode": guard.mode if guard.is_enabled else UNGUARDED,
        "preset": guard.preset_in_force,
        "gradient_screen": guard.screens_gradients,
        "q": guard.audit_rate if guard.is_enabled else None,
        "p": guard.step_audit_rate if guard.is_enabled else None,
        "owner_audit_rate": guard.owner_audit_rate if guard.is_enabled else None,
        "K": layout.stages,
        "M": layout.microbatches,
        "shadow": guard.shadow if guard.is_enabled else None,
    }


def _share_columns(guard: GuardConfig, arm: ArmMeasurement, base: ArmMeasurement, layout: RunShape) -> Row:
    row: Row = dict.fromkeys(("extra_bytes", "extra_bytes_shadow", "extra_wall", "extra_expected", "fits_in_bubble"))
    row |= guard_cost(arm if guard.is_enabled else None, base)
    row |= {
        "bubble_share": layout.bubble_share,
        "untrusted_share": layout.untrusted_share,
        "predicted_extra_compute": layout.predict_extra_work(guard),
        "formula": formula_of(guard),
        "audits_per_step": sum(block.report.audits for block in arm.blocks) / arm.step_count
        if guard.is_enabled
        else None,
        "expected_audits_per_step": layout.expected_audits(guard),
        "alarms": sum(block.report.alarms for block in arm.blocks) if guard.is_enabled else None,
    }
    if not guard.is_enabled:
        return row
    upkeep = guard.shadow_upkeep.bytes_sent * layout.trained_untrusted
    before = _bytes_per_step(base)
    extra = row["extra_over_unguarded"]
    return row | {
        "extra_expected": _extra_expected(row),
        "extra_bytes": (_bytes_per_step(arm) - upkeep) / before - 1,
        "extra_bytes_shadow": upkeep / before,
        "extra_wall": median(a / b for a, b in zip(arm.wall_s, base.wall_s, strict=True)) - 1,
        "fits_in_bubble": layout.fits_in_bubble(extra) if isinstance(extra, float) else None,
    }


def _extra_expected(row: Row) -> float | None:
    """`extra_compute` in the long run: as many audits as expected, and the same work at the same price in both arms."""
    extra, same, audit = (row[name] for name in ("extra_compute", "part_same_work", "part_audit"))
    drawn, expected = row["audits_per_step"], row["expected_audits_per_step"]
    if not (isinstance(extra, float) and isinstance(same, float) and isinstance(audit, float)):
        return None
    if not isinstance(drawn, float) or not isinstance(expected, float):
        return extra - same
    return extra - same + audit * (expected / drawn - 1.0) if drawn else None


def _absolute_columns(arm: ArmMeasurement) -> Row:
    return {
        "steps": arm.step_count,
        "cpu_s_per_step": median(arm.cpu_s),
        "wall_s_per_step": median(arm.wall_s),
        "bytes_per_step": _bytes_per_step(arm),
        "loss_last": arm.blocks[-1].report.losses[-1],
    }


def _bytes_per_step(arm: ArmMeasurement) -> float:
    return sum(size for block in arm.blocks for size in block.report.bytes_by_link.values()) / arm.step_count
