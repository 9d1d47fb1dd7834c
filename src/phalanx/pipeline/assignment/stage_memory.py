"""The bytes that a stage needs at its holder, at each rank of one, and at its shadow, computed from its shapes."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache

from phalanx.config import canonical_json
from phalanx.models import FAMILIES, SlicedAdapter, StageRow, StageSpec, shared_hub_config, stage_table
from phalanx.pipeline.assignment.memory import Footprint
from phalanx.pipeline.party_layout import PartyLayout
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.stage.stage_copy import stage_spec
from phalanx.planner.schedules import SCHEDULES, max_in_flight

NUMBER_BYTES = 4
"""Bytes of one number: weights, moments, gradients and messages are float32; so are activations, at most."""

_NARROW_BYTES = 2
"""Bytes of a bf16 weight, beside the master of one that is trained."""

_PER_BLOCK = 16
"""Numbers of the hidden size that a block keeps for its backward pass, per token; measured, with fused attention."""

_EAGER_SCORES = 2
"""Numbers that eager attention keeps for each pair of tokens and head: scores and their softmax."""


def stage_counts(plan: StepPlan, stage: int) -> StageRow:
    """How many numbers a stage has, and how many of them are trained; a tied head counts in the first stage."""
    row = _count_stage(canonical_json(plan.hub_config), stage_spec(plan, stage), plan.adapter)
    if plan.precision != "bf16_weights":
        return row
    return replace(row, size_bytes=_NARROW_BYTES * row.parameters + NUMBER_BYTES * row.trainable)


def stage_footprints(plan: StepPlan) -> tuple[Footprint, ...]:
    """Return the memory of each stage; of middle ones with everything that the guard asks of holder and shadow.

    Counted are weights, moments, gradients, the optimizer's buffer for clipping, what is kept in order to go back,
    activations of the microbatches in flight, and messages that are kept until the step is decided. Not counted are
    the process itself with its libraries, and the copy of a state that is on its way while roles change.
    """
    return tuple(Footprint(_held_bytes(plan, stage), _shadowed_bytes(plan, stage)) for stage in range(len(plan.stages)))


def activation_bytes(plan: StepPlan, stage: int) -> int:
    """Bytes that one microbatch keeps between its forward and its backward pass through a stage."""
    config, spec = shared_hub_config(plan.hub_config), stage_spec(plan, stage)
    tokens = plan.microbatch_size * plan.sequence_length
    block = _PER_BLOCK * tokens * plan.hidden_size
    if FAMILIES[config.model_type].choose_kernel(plan.attention) == "eager":
        block += _EAGER_SCORES * tokens * plan.sequence_length * int(config.num_attention_heads)
    blocks = spec.num_layers * block
    if plan.activation_checkpointing:
        # the inputs of all blocks, and one block while it is computed again
        blocks = spec.num_layers * tokens * plan.hidden_size + block
    head = 2 * tokens * int(config.vocab_size) if spec.is_last else 0
    return NUMBER_BYTES * (blocks + head)


def _held_bytes(plan: StepPlan, stage: int) -> int:
    row, guard, spec = stage_counts(plan, stage), plan.guard, stage_spec(plan, stage)
    is_middle = not (spec.is_first or spec.is_last)
    # moments, gradient, gradient times the clip coefficient
    per_trained = 2 + 1 + 1
    if guard.is_enabled and is_middle and guard.sends_gradient:
        # on its way to each other copy
        per_trained += guard.shadows
    messages = (2 if is_middle else 1) * boundary_bytes(plan, kept_steps=guard.commit_lag)
    activations = max_microbatches(plan, stage) * activation_bytes(plan, stage)
    return row.size_bytes + NUMBER_BYTES * per_trained * row.trainable + messages + activations


def _shadowed_bytes(plan: StepPlan, stage: int) -> int:
    row = stage_counts(plan, stage)
    # inputs that are fetched for audits, and what came out
    audits = 2 * boundary_bytes(plan) + activation_bytes(plan, stage)
    # moments, undo copy of weights and moments, this gradient and the last one, gradient times the clip coefficient
    per_trained = 2 + 3 + 2 + 1
    return row.size_bytes + NUMBER_BYTES * per_trained * row.trainable + audits


def max_microbatches(plan: StepPlan, stage: int) -> int:
    """How many microbatches are between their forward and their backward pass at once."""
    num_stages = len(plan.stages)
    return max_in_flight(SCHEDULES[plan.schedule].order(stage, num_stages, plan.microbatches, 1))


def boundary_bytes(plan: StepPlan, kept_steps: int = 0) -> int:
    """What came in from one side of a stage in a step and what went out there; of kept steps what went out."""
    return plan.microbatches * plan.hidden_bytes * (2 + kept_steps)


@lru_cache(maxsize=256)
def _count_stage(hub_config: bytes, spec: StageSpec, adapter: SlicedAdapter | None) -> StageRow:
    (row,) = stage_table(shared_hub_config(json.loads(hub_config)), (spec,), adapter)
    return row


_GRADIENTS_SHARED = 2
_MOMENTS, _CLIPPED, _WEIGHT = 2, 1, 1
"""Numbers per trained number: moments, the gradient times the clip coefficient, a weight."""


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
    """Return the bytes that each rank of a layout needs, counted as `stage_footprints` counts a holder's."""
    row, guard = stage_counts(plan, stage), plan.guard
    trained = NUMBER_BYTES * row.trainable
    state = (_MOMENTS + _CLIPPED) * trained
    sums = trained // layout.tp // (layout.num_copies if layout.zero >= _GRADIENTS_SHARED else 1)
    activations = max_microbatches(plan, stage) * activation_bytes(plan, stage) // layout.num_copies
    shared = (state + _WEIGHT * trained) // layout.num_ranks if layout.zero else 0
    other = row.size_bytes // layout.tp + sums + activations + shared
    messages = 2 * boundary_bytes(plan, kept_steps=guard.commit_lag)
    signed = (1 + guard.shadows if guard.is_enabled and guard.sends_gradient else 1) * trained
    return RankBytes(other + row.size_bytes + signed + messages + (0 if layout.zero else state), other)
