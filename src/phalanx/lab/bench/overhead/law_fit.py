"""The parts of a guard's cost, and the price law that is fitted to them over sizes of steps and models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy
from numpy.typing import NDArray

from phalanx.planner.guard.price_law import PriceLaw, StepSize

PARTS: Mapping[str, tuple[str, ...]] = {
    "audits": ("audit",),
    "shadows": ("shadow_send", "shadow_receive", "shadow_apply"),
    "undo_copies": ("optimizer",),
    "states": ("state_digest", "journal"),
    "messages": ("send", "commit", "screen", "wait"),
    "transport": ("other_threads",),
}
"""Parts of the extra CPU time, by the phases that make them. The undo copies are what a guarded optimizer's phase takes
more; the transport's threads encrypt, check signatures and digests, and copy."""

COORDINATION, SAME_WORK = "coordination", "same_work"
"""The compute threads outside of phases; and the forward and backward passes, equal in both arms but for noise."""

GUARD_PARTS = (*PARTS, COORDINATION)
"""The parts that are the guard's."""

_ACROSS = ("process", "hashing", "signing", "busy_wall", "other_threads", "compute")


def part_seconds(usage: Mapping[str, float]) -> dict[str, float]:
    """Split the CPU seconds of all parties into parts that add up to ``process``."""
    parts = {part: sum(usage.get(phase, 0.0) for phase in phases) for part, phases in PARTS.items()}
    phases = sum(seconds for phase, seconds in usage.items() if phase not in _ACROSS)
    parts[SAME_WORK] = usage.get("compute", 0.0)
    parts[COORDINATION] = usage["process"] - usage["other_threads"] - phases - parts[SAME_WORK]
    return parts


@dataclass(frozen=True)
class LawCell:
    """The measurements of one model at one size of step.

    Attributes:
        base_s: CPU seconds of the unguarded step, all parties.
        compute_s: Those of its forward and backward passes.
        extra_s: CPU seconds that each arm adds to a step in `GUARD_PARTS`, by arm.
        audits: Recomputed microbatches a step, by arm.
        memory_bytes: What the arm `economy` needs more than the unguarded one, all parties.
    """

    size: StepSize
    base_s: float
    compute_s: float
    extra_s: Mapping[str, float]
    audits: Mapping[str, float]
    memory_bytes: float

    def audit_seconds(self, arm: str, unscreened_s: float = 0.0) -> float:
        """CPU seconds of one recomputed microbatch in an arm, by comparison with `economy`, which has few.

        Args:
            unscreened_s: Of one in `economy`; 0 where both are of one kind.
        """
        if not unscreened_s:
            return (self.extra_s[arm] - self.extra_s["economy"]) / (self.audits[arm] - self.audits["economy"])
        return (self.extra_s[arm] - self.upkeep_seconds(unscreened_s)) / self.audits[arm]

    def upkeep_seconds(self, unscreened_s: float) -> float:
        """CPU seconds that the guard takes without any audit."""
        return self.extra_s["economy"] - self.audits["economy"] * unscreened_s

    def owner_seconds(self, unscreened_s: float) -> float:
        """CPU seconds of the owner's audits in the arm `owner`, where it redoes every watched stage in every step."""
        shadows = self.audits["owner"] - self.size.watched_stages * self.size.microbatches
        return self.extra_s["owner"] - self.upkeep_seconds(unscreened_s) - shadows * unscreened_s

    @property
    def microbatch_seconds(self) -> float:
        """CPU seconds of a watched stage's work on one microbatch, in the mean."""
        return self.compute_s * self.size.watched_share / (self.size.watched_stages * self.size.microbatches)


def fit_price_law(cells: Sequence[LawCell], source: str) -> PriceLaw:
    """Fit the law by least squares of relative errors; no cost is below 0.

    Args:
        cells: At least three, of two models or more.
    """
    terms, units = list[list[float]](), list[float]()
    for cell in cells:
        unscreened_s = cell.audit_seconds("light")
        terms.append([1.0, cell.microbatch_seconds, 0.0])
        units.append(unscreened_s)
        for arm in {"standard", "strict"} & cell.extra_s.keys():
            terms.append([1.0, 0.0, cell.microbatch_seconds])
            units.append(cell.audit_seconds(arm, unscreened_s))
    audit_s, audited, screened = fit_costs(terms, units)
    unscreened = [audit_s + audited * cell.microbatch_seconds for cell in cells]
    upkeep = [cell.upkeep_seconds(seconds) for cell, seconds in zip(cells, unscreened, strict=True)]
    sizes = [cell.size for cell in cells]
    step_s, parameter_s, number_s = fit_costs(
        [[1.0, size.watched_parameters, size.sent_numbers] for size in sizes], upkeep
    )
    base = fit_costs(
        [[1.0, size.parameters, size.parameters * size.tokens] for size in sizes], [cell.base_s for cell in cells]
    )
    works = [size.parameters * size.tokens * size.watched_share * base[2] for size in sizes]
    owners = [cell.owner_seconds(seconds) for cell, seconds in zip(cells, unscreened, strict=True)]
    owner_share, owner_parameter_s = fit_costs(
        [[work, size.watched_parameters] for work, size in zip(works, sizes, strict=True)], owners
    )
    memory = median(cell.memory_bytes / cell.size.watched_parameters for cell in cells)
    return PriceLaw(
        base_step_s=base[0],
        base_parameter_s=base[1],
        base_work_s=base[2],
        step_s=step_s,
        parameter_s=parameter_s,
        number_s=number_s,
        audit_s=audit_s,
        audited_share=audited,
        screened_share=screened,
        owner_share=owner_share,
        owner_parameter_s=owner_parameter_s,
        memory_number_bytes=memory,
        source=source,
    )


def fit_costs(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return coefficients, none below 0, whose sums of terms are nearest to the seconds by relative error."""
    weighted = numpy.asarray(terms, dtype=numpy.float64) / numpy.asarray(seconds, dtype=numpy.float64)[:, None]
    columns = list(range(weighted.shape[1]))
    scale: NDArray[numpy.float64] = numpy.abs(weighted).max(axis=0)
    while True:
        solved = numpy.linalg.lstsq(weighted[:, columns] / scale[columns], numpy.ones(len(seconds)), rcond=None)[0]
        worst = int(numpy.argmin(solved))
        if solved[worst] >= 0.0 or len(columns) == 1:
            break
        del columns[worst]
    fitted = dict(zip(columns, (solved / scale[columns]).clip(min=0.0), strict=True))
    return tuple(float(fitted.get(column, 0.0)) for column in range(weighted.shape[1]))
