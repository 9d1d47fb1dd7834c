"""The bytes that a stage needs at each rank of a party that serves it with several."""

from dataclasses import dataclass

from phalanx.pipeline.assignment.stage_memory import (
    NUMBER_BYTES,
    activation_bytes,
    boundary_bytes,
    kept_to_go_back,
    most_microbatches,
    stage_counts,
)
from phalanx.pipeline.party_layout import PartyLayout
from phalanx.pipeline.plan import StepPlan

_GRADIENTS_SHARED = 2
_MOMENTS, _CLIPPED, _WEIGHT = 2, 1, 1
"""Numbers per trained number: moments, the gradient times the clip coefficient, a weight."""
_SIGNED = 2
"""The whole gradient, and the same on its way to the shadow."""


@dataclass(frozen=True)
class RankBytes:
    """What the ranks of a party need for a stage that it serves, computed from shapes.

    Attributes:
        first: At rank 0, which has whole weights, signs whole gradients and keeps messages.
        other: At each other rank, where tensors of the state are of one size.
    """

    first: int
    other: int


def rank_bytes(plan: StepPlan, stage: int, layout: PartyLayout) -> RankBytes:
    """Return what each rank of a layout needs; counted is what `footprints` counts of a holder."""
    row, guard = stage_counts(plan, stage), plan.guard
    trained = NUMBER_BYTES * row.trainable
    state = (_MOMENTS + _CLIPPED + kept_to_go_back(guard)) * trained
    sums = trained // layout.tp // (layout.copies if layout.zero >= _GRADIENTS_SHARED else 1)
    activations = most_microbatches(plan, stage) * activation_bytes(plan, stage) // layout.copies
    shared = (state + _WEIGHT * trained) // layout.world if layout.zero else 0
    other = row.size_bytes // layout.tp + sums + activations + shared
    messages = 2 * boundary_bytes(plan, kept_steps=guard.undoable_steps)
    signed = _SIGNED * trained if guard.enabled and guard.sends_gradient else trained
    return RankBytes(other + row.size_bytes + signed + messages + (0 if layout.zero else state), other)
