"""Plans by which tensor parallel ranks share the blocks of a family, by the names of transformers' modules."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.planner.model.families import FAMILIES

EXPERTS = "mlp.experts"
"""Where transformers' modules have the experts of a block."""


@dataclass(frozen=True)
class BlockPlan:
    """The shared matrices of one block.

    Attributes:
        columns: Linear layers of which each rank has some outputs, with the matrices that lie side by side in them.
        rows: Linear layers of which each rank has the inputs that belong to those; their outputs are summed.
        entries: Modules with a first input at which the shared work begins.
        attention: The module that knows its number of heads.
        per_head: Its attributes that are divided by the number of ranks.
        experts: The module of all experts of a mixture, of which each rank has some; None without.
    """

    columns: Mapping[str, int]
    rows: tuple[str, ...]
    entries: tuple[str, ...]
    attention: str
    per_head: tuple[str, ...]
    experts: str | None = None


def plan_of(family: str) -> BlockPlan:
    """Return the plan by which ranks share a block, from the family's facts about its matrices."""
    facts = FAMILIES[family]
    side_by_side = {"all": 1 if facts.heads_first else 3}
    columns = {name: side_by_side.get(width, 1) for name, feed, width in facts.matrices if feed in ("first", "second")}
    module_of = {feed: name.partition(".")[0] for name, feed, _ in reversed(facts.matrices)}
    return BlockPlan(
        columns=columns,
        rows=tuple(name for name, _, _ in facts.matrices if name not in columns),
        entries=tuple(module_of[feed] for feed in ("first", "second") if feed in module_of),
        attention=module_of["first"],
        per_head=facts.per_head,
        experts=None if facts.experts is None else EXPERTS,
    )
