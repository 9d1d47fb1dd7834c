"""Bytes that each rank needs, by part, and the moments of a step at which its memory can be highest."""

from dataclasses import dataclass, fields
from functools import lru_cache

from phalanx.planner.cost.diloco_cost import outer_bytes, outer_numbers, working_copies
from phalanx.planner.cost.partition import balanced_layers
from phalanx.planner.layout import Layout
from phalanx.planner.model.activations import block_bytes, boundary_bytes, head_bytes, microbatch_tokens, peak_bytes
from phalanx.planner.model.adapter import adapter_numbers
from phalanx.planner.model.compute import forward_flops
from phalanx.planner.model.recipe import EXACT_BYTES, Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.schedules import SCHEDULES, max_in_flight, rank_orders

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
    def total_bytes(self) -> int:
        """Both."""
        return self.activations + self.buffers


@dataclass(frozen=True)
class RankShare:
    """The share of one pipeline rank.

    Attributes:
        parameters: Before ZeRO shares them, frozen ones too.
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
    shares = layout.zero >= 2 and layout.num_shards > 1 and not late
    gathers = (layout.zero >= 3 and layout.num_shards > 1) or (recipe.offload == "all" and layout.zero != 2)
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
        moments.append(TransientMemory(0, parameters + summed + -(-summed // layout.num_shards)))
    if recipe.outer is not None:
        largest = max(table if around and recipe.adapter is None else 0, added) // recipe.weight_bytes * EXACT_BYTES
        slices = layout.num_shards if layout.zero >= 2 else 1
        moments.append(TransientMemory(0, working_copies(recipe.outer) * -(-largest // slices)))
    worst = max(moments, key=lambda moment: moment.total_bytes)
    return TransientMemory(worst.activations, worst.buffers + lasting)


def _lasting_buffers(shape: ModelShape, layout: Layout, recipe: Recipe, share: RankShare) -> int:
    """Bytes of buffers that are there at all of these moments."""
    size = 0
    if layout.zero == 2 and layout.num_shards > 1 and recipe.offload != "all":
        # the rank's own part stays beside the whole that was gathered
        size += -(-share.parameters * recipe.weight_bytes // layout.num_shards)
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


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at the worst moment of a step.

    Attributes:
        parameters: Stored weights, without a master copy.
        optimizer: Its state and the master copy.
        activations: Bytes that the microbatches in flight store for their backward passes, the loss included, at the
            worst moment.
        buffers: Bytes at that moment of gathered blocks, gradients before they are added or shared, messages, copies of
            weights.
        host: Bytes in the host's memory, by offloading; not in `total`.
        outer: Anchor and momentum of islands, and what rounding has lost.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int = 0
    outer: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes on the device."""
        return sum(self.parts_by_name().values())

    def parts_by_name(self) -> dict[str, int]:
        """Return the parts that add up to the total, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "host"}


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of one rank, before ZeRO shares them.

    Attributes:
        trained: Those that have gradients and optimizer states.
    """

    stored: int
    trained: int


def checkpoint_bytes(shape: ModelShape, recipe: Recipe, *, weights_only: bool = False) -> int:
    """Return the size of a checkpoint: 16-bit weights alone, or all that training goes on from."""
    return shape.num_parameters * (2 if weights_only else recipe.weight_bytes + recipe.state_bytes)


@lru_cache(maxsize=512)
def stage_layers(shape: ModelShape, sequence_length: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage, balanced by operations; the head's count in the last stage."""
    flops = forward_flops(shape, sequence_length)
    costs = [float(flops.block + flops.scores)] * shape.layers
    costs[-1] += flops.head
    return balanced_layers(costs, num_stages)


def worst_rank(shape: ModelShape, layout: Layout, recipe: Recipe) -> RankMemory:
    """Return the memory of the pipeline rank that needs most."""
    every = stage_layers(shape, recipe.sequence_length, layout.pp * layout.stages_per_rank)
    # of ranks with equally many layers the first holds most microbatches; both ends hold more than layers
    first = {every[rank :: layout.pp]: rank for rank in reversed(range(layout.pp))}
    ranks = {0, layout.pp - 1, *first.values()}
    return max((rank_memory(shape, layout, recipe, rank) for rank in ranks), key=lambda found: found.total_bytes)


def rank_memory(shape: ModelShape, layout: Layout, recipe: Recipe, rank: int) -> RankMemory:
    """Return the memory of one pipeline rank.

    Args:
        rank: Place in the pipeline; ranks of other axes are alike.

    Source: Rajbhandari et al. 2020 (ZeRO), section 5, for shared state; Korthikanti et al. 2022 for activations.
    """
    mine = stage_layers(shape, recipe.sequence_length, layout.pp * layout.stages_per_rank)[rank :: layout.pp]
    return memory_of(shape, layout, recipe, mine, rank)


def memory_of(shape: ModelShape, layout: Layout, recipe: Recipe, layers: tuple[int, ...], rank: int) -> RankMemory:
    """Return the memory of a pipeline rank that has stages of so many layers each."""
    parameters_held = held_parameters(shape, layout, recipe, sum(layers), rank)
    weights, shards = recipe.weight_bytes, layout.num_shards
    late = layout.shares_late
    parameters = _shared_bytes(parameters_held.stored * weights, shards, layout.zero >= 3)
    gradients = _shared_bytes(parameters_held.trained * weights, shards, layout.zero >= 2 and not late)
    optimizer = _shared_bytes(parameters_held.trained * recipe.state_bytes, shards, layout.zero >= 1)
    outer = 0 if recipe.outer is None else outer_bytes(outer_numbers(parameters_held.trained, layout), recipe.outer)
    host = 0
    if recipe.offload != "none":
        host, optimizer = optimizer, 0
    if recipe.offload == "all":
        # ZeRO 2 brings its part to the device and gathers the whole there
        unsharded = parameters if layout.zero == 2 else 0
        host += (_shared_bytes(gradients, shards, True) if late else gradients) + (
            _shared_bytes(parameters, shards, True) if unsharded else parameters
        )
        parameters, gradients = unsharded, gradients if late else 0
        host, outer = host + outer, 0
    worst = worst_moment(
        shape,
        layout,
        recipe,
        RankShare(
            parameters_held.stored,
            parameters_held.trained,
            sum(layers),
            _kept_bytes(shape, layout, recipe, layers, rank),
            rank == layout.pp - 1,
        ),
    )
    return RankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=worst.activations,
        buffers=worst.buffers,
        host=host,
        outer=outer,
    )


def held_parameters(shape: ModelShape, layout: Layout, recipe: Recipe, layers: int, rank: int) -> ParameterCounts:
    """Return the parameters of one pipeline rank with so many layers; beside adapters all others are frozen."""
    base = rank_parameters(shape, layout, layers, rank)
    if recipe.adapter is None:
        return ParameterCounts(base, base)
    added = layers * adapter_numbers(shape, recipe.adapter, layout.tp)
    if rank == 0 and recipe.adapter.prompt is not None:
        added += recipe.adapter.prompt.num_parameters(shape.hidden)
    return ParameterCounts(base + added, added)


def rank_parameters(shape: ModelShape, layout: Layout, layers: int, rank: int) -> int:
    """Return the model's own parameters on one pipeline rank, before ZeRO shares them.

    A tied head on another rank than the embedding is a copy of it.
    """
    number = layers * (-(-shape.layer_split // layout.tp) + shape.layer_whole)
    if rank == 0:
        number += -(-shape.embedding // layout.tp)
    if rank == layout.pp - 1:
        head = shape.head_matrix if layout.pp > 1 else shape.head
        number += shape.final + -(-head // layout.tp)
    return number


def in_flight(layout: Layout, microbatches: int, rank: int) -> int:
    """Return how many microbatches one pipeline rank holds at most, counted once for each of its stages."""
    if layout.pp == 1:
        return 1
    if SCHEDULES[layout.schedule].fills_first:
        return microbatches
    # a longer run holds no more
    enough = min(microbatches, 4 * layout.pp)
    return _in_flight(layout.schedule, layout.pp, enough, layout.stages_per_rank)[rank]


@lru_cache(maxsize=512)
def _in_flight(schedule: str, num_ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    return tuple(max_in_flight(order) for order in rank_orders(schedule, num_ranks, microbatches, chunks))


def _kept_bytes(shape: ModelShape, layout: Layout, recipe: Recipe, layers: tuple[int, ...], rank: int) -> int:
    """Bytes that the microbatches in flight keep in the blocks of a rank."""
    microbatches = in_flight(layout, recipe.microbatches, rank)
    block = block_bytes(shape, layout, recipe)
    # with several stages a rank, those that are held are spread over them as evenly as the schedule does
    return (
        microbatches * block * max(layers)
        if len(layers) == 1
        else round(microbatches * block * sum(layers) / len(layers))
    )


def _shared_bytes(size: int, shards: int, is_shared: bool) -> int:
    return -(-size // shards) if is_shared else size
