"""The facts about a model family, without torch: sizes, matrices, and how ranks may share them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.shape import ModelShape

Feed = Literal["first", "mixed", "second", "inner"]
"""What a matrix multiplies: what the first norm gave, what attention gave, the second norm, or the MLP's middle."""

Width = Literal["all", "queries", "shared", "inner", "stream"]
"""What a matrix gives: queries, keys and values in one, queries, keys or values, the MLP's middle, or the stream."""


@dataclass(frozen=True)
class FamilyFacts:
    """One line of the table.

    Attributes:
        shape: Reads the sizes from the hub's config.
        matrices: Of a block, in the order of the module: name, what it multiplies, and what it gives.
        adapter_targets: Ends of the names of those that have an adapter where none are named.
        per_head: Attributes of the attention module that tensor parallel ranks divide among themselves.
        heads_first: Whether one matrix of queries, keys and values puts those of one head together, so that its rows
            can be dealt out as they are, and not all heads of the queries together.
        composed_norm: Whether a norm is composed of several kernels, and keeps its normalised input as well.
        biased_scores: Whether attention adds a bias to its scores, for which kernels and a ring of ranks have no room.
        dropout: Where a config has attention's dropout, with transformers' default.
    """

    shape: Callable[[ConfigKeys], ModelShape]
    matrices: tuple[tuple[str, Feed, Width], ...]
    adapter_targets: tuple[str, ...]
    per_head: tuple[str, ...] = ("num_heads",)
    heads_first: bool = False
    composed_norm: bool = False
    biased_scores: bool = False
    dropout: tuple[str, float] = ("attention_dropout", 0.0)
