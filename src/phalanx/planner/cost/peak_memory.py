"""The peak memory of a rank: its memory beside its state, at the moments of a step that can be the worst."""

from dataclasses import dataclass

from phalanx.planner.cost.diloco_cost import working_copies
from phalanx.planner.layout import Layout
from phalanx.planner.model.activations import block_bytes, boundary_bytes, head_bytes, microbatch_tokens, peak_bytes
from phalanx.planner.model.adapter import adapter_numbers
from phalanx.planner.model.recipe import EXACT_BYTES, Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.schedules import SCHEDULES

AUTOCAST_BYTES = 2
"""Autocast keeps a 16-bit copy of the weights that it has used."""


@dataclass(frozen=True)
class TransientMemory:
    """Bytes at one moment, beside weights, gradients and optimizer state that are there all the time.

    Attributes:
        activations: Bytes stored for backward passes, and made by the current one.
        buffers: Gathered weights, gradients that are not where they belong yet, copies.
    """

    activations: int
    buffers: int

    @property
    def total(self) -> int:
        """Both."""
        return self.activations + self.buffers


@dataclass(frozen=True)
class RankShare:
    """The share of one pipeline rank.

    Attributes:
        parameters: Before ZeRO shares them, frozen ones too.
        layers: Number of blocks on this rank.
        kept: Bytes that all microbatches in flight keep in these blocks.
        has_head: Whether it takes the loss.
    """

    parameters: int
    trained: int
    layers: int
    kept: int
    has_head: bool


def worst_moment(shape: ModelShape, layout: Layout, recipe: Recipe, share: RankShare) -> TransientMemory:
    """Return the moment of a step at which most is held.

    The moments are: the loss, with all logits; the backward pass of a block, with the stored activations of others; and
    the end, when gradients around the blocks are summed as one. Gradients that ZeRO 2 and 3 share lie in the buffer
    from which they are summed until the next block's are, and a block's parameters are fetched while the block behind
    it is at work. In a pipeline gradients are whole until its last microbatch, and parameters from one backward pass to
    the next forward pass. The last gathered block of a forward pass stays in its buffer as well until the next pass
    gathers. Frozen parameters are gathered and have no gradient. Islands are joined when no activations are stored any
    more, tensor by tensor.

    Source: torch's DistributedDataParallel and ``fully_shard`` (2.13); their allocations bind the engine.
    """
    split = (-(-shape.layer_split // layout.tp) + shape.layer_whole) * recipe.weight_bytes
    thin = 0 if recipe.adapter is None else adapter_numbers(shape, recipe.adapter, layout.tp) * recipe.weight_bytes
    block, trained = split + thin, split if recipe.adapter is None else thin
    around = share.parameters * recipe.weight_bytes - share.layers * block
    table = -(-shape.head_matrix // layout.tp) * recipe.weight_bytes
    # the head's own gradient is whole before it is added to what other microbatches and the embedding gave
    head = table if share.has_head and recipe.adapter is None else 0
    summed = around if recipe.adapter is None else 0
    late = layout.shares_late
    shares = layout.zero >= 2 and layout.shards > 1 and not late
    gathers = (layout.zero >= 3 and layout.shards > 1) or (recipe.offload == "all" and layout.zero != 2)
    fetched, held_around = (block, around) if gathers else (0, 0)
    working = peak_bytes(shape, layout, recipe)
    block_size = block_bytes(shape, layout, recipe)
    lasting = _lasting_buffers(shape, layout, recipe, share)
    loss = head_bytes(shape, layout, recipe) if share.has_head else 0
    # the largest matrix of a block, before it is added
    added = trained // 3
    moments = [
        TransientMemory(share.kept + loss, held_around + (block if shares else fetched) + head),
        TransientMemory(
            share.kept + working,
            held_around + (3 if shares else 2) * fetched + (head if shares else 0) + (0 if shares else added),
        ),
        TransientMemory(
            max(0, share.kept - block_size) + working,
            held_around + 2 * fetched + (head + 2 * trained if shares else added),
        ),
        TransientMemory(0, held_around + (2 * summed if shares else head)),
    ]
    if late:
        # parameters are whole from the end of a backward pass on, when its own microbatch is no longer kept
        parameters = share.parameters * recipe.weight_bytes if layout.zero >= 3 else 0
        others = max(0, share.kept - share.layers * block_size // layout.stages_per_rank)
        moments.append(TransientMemory(others + working, parameters))
        # what lies around the blocks is the first that is summed, while all others are whole still
        moments.append(TransientMemory(0, parameters + summed + -(-summed // layout.shards)))
    has_buckets = (
        layout.zero < 2 and layout.shards > 1 and (layout.pp == 1 or not SCHEDULES[layout.schedule].splits_backward)
    )
    if has_buckets:
        # after the first step DDP makes its buckets anew, in the order in which gradients came, beside the old ones
        moments.append(TransientMemory(0, share.trained * recipe.weight_bytes))
    if recipe.outer is not None:
        largest = max(table if around and recipe.adapter is None else 0, added) // recipe.weight_bytes * EXACT_BYTES
        slices = layout.shards if layout.zero >= 2 else 1
        moments.append(TransientMemory(0, working_copies(recipe.outer) * -(-largest // slices)))
    worst = max(moments, key=lambda moment: moment.total)
    return TransientMemory(worst.activations, worst.buffers + lasting)


def _lasting_buffers(shape: ModelShape, layout: Layout, recipe: Recipe, share: RankShare) -> int:
    """Bytes of buffers that are there at all of these moments."""
    size = 0
    if layout.zero == 2 and layout.shards > 1 and recipe.offload != "all":
        # the rank's own part stays beside the whole that was gathered
        size += -(-share.parameters * recipe.weight_bytes // layout.shards)
    if layout.pp > 1:
        size += 4 * boundary_bytes(shape, layout, recipe)
    tokens = microbatch_tokens(layout, recipe)
    if layout.tp > 1:
        size += tokens * shape.hidden * recipe.inner_bytes
    if layout.cp > 1 and layout.context == "ring":
        # keys and values at hand and on their way, the same of their gradients, and those of the queries
        shared, queries = (tokens * heads * shape.head_dim // layout.tp for heads in (shape.kv_heads, shape.heads))
        size += 4 * shared * (recipe.inner_bytes + EXACT_BYTES) + queries * EXACT_BYTES
    elif layout.cp > 1:
        size += 4 * tokens * shape.heads * shape.head_dim // layout.tp * recipe.inner_bytes
    if recipe.precision == "autocast" and layout.zero < 3:
        size += share.parameters * AUTOCAST_BYTES
    return size
