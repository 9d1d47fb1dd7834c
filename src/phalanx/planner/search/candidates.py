"""The candidate layouts: every way to share the ranks, and groups that stay inside a node."""

from collections.abc import Iterator
from dataclasses import replace

from phalanx.planner.cost.exchanging import SHARED_GRADIENTS
from phalanx.planner.layout import Layout, all_layouts
from phalanx.planner.model.recipe import OuterLoop


def candidate_layouts(
    world: int, per_node: int, outer: OuterLoop | None, own: Layout | None = None
) -> Iterator[Layout]:
    """Yield every layout of so many ranks once.

    Where copies that share gradients or parameters lie on several nodes, they are tried in groups as large as a node
    as well, so that parameters stay inside; other numbers of groups are judged where a caller asks for them.

    Args:
        per_node: Number of ranks on each node.
        outer: Joins of islands; None where there are none.
        own: One that is to be among them, if it has so many ranks.
    """
    unique: dict[Layout, None] = {}
    for bare in all_layouts(world):
        layout = in_islands(bare, outer)
        unique[layout] = None
        replicas = _groups_of_a_node(layout, per_node)
        if replicas > 1:
            unique[replace(layout, replicas=replicas)] = None
    if own is not None and own.num_ranks == world:
        unique[own] = None
    yield from unique


def in_islands(layout: Layout, outer: OuterLoop | None) -> Layout:
    """Return a layout with its copies cut into the islands of a recipe."""
    if outer is None:
        return layout
    return replace(layout, islands=layout.dp if outer.islands is None else outer.islands)


def describe_island_mismatch(layout: Layout, outer: OuterLoop | None) -> str | None:
    """Say why a layout's islands differ from the recipe's; None where they agree."""
    if outer is None:
        if layout.islands == 1:
            return None
        return f"islands={layout.islands}: nothing says when they are joined; plan a run file with [parallel.outer]"
    if layout.dp == 1:
        return "outer joins islands of data parallel copies, and dp=1; raise dp"
    islands = in_islands(layout, outer).islands
    return None if layout.islands == islands else f"islands={layout.islands}: the run file has {islands}; remove it"


def _groups_of_a_node(layout: Layout, per_node: int) -> int:
    """Return the fewest groups none of which lies on several nodes; 1 where there is no use for them."""
    near, copies = layout.tp * layout.cp, layout.dp // layout.islands
    if layout.zero < SHARED_GRADIENTS or near * copies <= per_node:
        return 1
    fitting = (
        divisor for divisor in range(2, copies + 1) if copies % divisor == 0 and near * copies // divisor <= per_node
    )
    replicas = next(fitting, 1)
    return replicas if layout.cp * copies > replicas else 1
