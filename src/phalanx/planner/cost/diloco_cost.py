"""Islands that train apart: memory that every rank needs for the step that joins them, and the time of that step.

Source: Douillard et al. 2023 (DiLoCo); the figures describe the engine, which joins tensor by tensor.
"""

from phalanx.planner.cluster.links import Link, all_gather, all_reduce
from phalanx.planner.layout import Layout
from phalanx.planner.model.adapter import adapted_linears, block_tensors
from phalanx.planner.model.recipe import EXACT_BYTES, OuterLoop, Recipe
from phalanx.planner.model.shape import ModelShape

_ROUNDED_BYTES = 1 + 4 / 1024
"""Bytes of a number that is sent as int8: one, and its part of the scale of a block of 1,024."""
_AROUND = 4
"""Maximum number of tensors outside the blocks: embedding tables, the last norm, an untied head."""
_MOVED = 18
"""Numbers read and written for each joined one: change, mean, momentum, anchor, and the weight itself."""
_MOVED_ROUNDING = 40
"""The same with rounding."""


def outer_numbers(trained: int, layout: Layout) -> int:
    """Return how many numbers one rank joins with other islands: as many as its optimizer updates."""
    return -(-trained // layout.num_shards) if layout.zero >= 2 else trained


def outer_bytes(numbers: int, outer: OuterLoop) -> int:
    """Return the bytes that a rank stores between outer steps: anchor and momentum, and the rounding errors."""
    return numbers * EXACT_BYTES * (3 if outer.rounds else 2)


def working_copies(outer: OuterLoop) -> int:
    """Number of fp32 copies of one tensor in memory at once while it is joined."""
    return 6 if outer.rounds else 1


def num_tensors(shape: ModelShape, recipe: Recipe, layers: int) -> int:
    """Return how many tensors a rank with so many blocks joins, one by one."""
    if recipe.adapter is not None:
        return 2 * layers * len(adapted_linears(shape, recipe.adapter))
    return layers * block_tensors(shape) + _AROUND


def sent_bytes(numbers: int, islands: int, outer: OuterLoop) -> float:
    """Return the bytes that a rank sends to other islands in one outer step."""
    if outer.rounds:
        return (islands - 1) * numbers * _ROUNDED_BYTES
    return 2 * (islands - 1) / islands * numbers * EXACT_BYTES


def outer_seconds(numbers: int, tensors: int, layout: Layout, outer: OuterLoop, link: Link) -> float:
    """Return the seconds of one exchange between islands; nothing of it is hidden."""
    islands = layout.islands
    if outer.rounds:
        # bytes and scales of each tensor, gathered from all
        gathered = all_gather(islands * numbers * _ROUNDED_BYTES, islands, link)
        return gathered + (2 * tensors - 1) * (islands - 1) * link.latency_s
    return all_reduce(numbers * EXACT_BYTES, islands, link) + (tensors - 1) * 2 * (islands - 1) * link.latency_s


def moved_bytes(numbers: int, outer: OuterLoop) -> int:
    """Return the bytes that a rank reads and writes in its own memory in one outer step."""
    return numbers * EXACT_BYTES * (_MOVED_ROUNDING if outer.rounds else _MOVED)
