"""The facts about a model family, without torch: sizes, matrices, and how ranks may share them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.shape import ModelShape

Feed = Literal["first", "mixed", "second", "inner"]
"""Input of a matrix: output of the first norm, of attention, of the second norm, or the MLP's middle."""

Width = Literal["all", "queries", "shared", "inner", "both", "stream"]
"""What a matrix gives: queries, keys and values in one, queries, keys or values, the MLP's middle, that and its gate in
one, or the stream."""

SharedAxis = Literal["tp", "cp"]


def no_rows(keys: ConfigKeys) -> int:
    """Return 0 rows beside the tokens' rows, for families where only tokens cross."""
    return 0


SizeKey = tuple[str, int]
"""A config key, with transformers' default."""


@dataclass(frozen=True)
class ExpertsRule:
    """The experts of a mixture, of which every block has a router and as many.

    Attributes:
        width: Inner width of one expert.
        count: Experts of a block, where the config leaves ``num_experts`` out.
        asked: Experts that one token asks.
        shared: Inner width of one more expert, which every token asks through a gate of its own.
        block: Name in the hub's files of what transformers' modules call ``mlp``.
        pieces: Names in the hub's files of an expert's gate, up and down.
    """

    width: SizeKey
    count: int
    asked: SizeKey
    shared: SizeKey | None = None
    block: str = "mlp"
    pieces: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


PipelinePlan = tuple[tuple[str, ...], str, tuple[str, ...]]
"""Members of the trunk before the blocks, the list of blocks, and members behind them."""


@dataclass(frozen=True)
class SlicingRule:
    """Facts that the stages of a model need beside transformers' own pipeline plan for it.

    Attributes:
        trunk: Name of the model without head.
        plan: The plan of a family for which transformers has none.
        windows: Layers with a sliding window: none, all where ``sliding_window`` is a number (``config``), or the ones
            named by ``layer_types`` (``layers``).
        rotary_by_type: Each of the layer types has rotary tables of its own.
        embedding_factor: Config key of a number that embeddings are multiplied by.
        embedding_dropout: Config key of the share of embeddings that is dropped by no module.
        scaled_embedding: The embedding module itself multiplies by a number that is in no file.
        logits: Whether logits are multiplied or divided behind the head, and the config key of the number.
        plain_attention: transformers has no fused attention kernel for the family.
        past_key: Name in a block's signature of keys and values that come before its own.
        stored_names: Pairs of names that differ between the hub's files and transformers' modules.
        refused: Config keys with the values that stages can carry; anything else is refused.
        further_keys: Keys that configs of the hub have and transformers' modules read, though the config class has no
            field for them.
    """

    trunk: str = "model"
    plan: PipelinePlan | None = None
    windows: Literal["none", "config", "layers"] = "none"
    rotary_by_type: bool = False
    embedding_factor: str | None = None
    embedding_dropout: str | None = None
    scaled_embedding: bool = False
    logits: tuple[Literal["multiplied", "divided", "capped"], str] | None = None
    plain_attention: bool = False
    past_key: str = "past_key_values"
    stored_names: tuple[tuple[str, str], ...] = ()
    refused: tuple[tuple[str, object], ...] = ()
    further_keys: tuple[str, ...] = ()

    def may_have_windows(self, keys: ConfigKeys) -> bool:
        """Return whether a layer of the model may have a sliding window, as far as its config says."""
        match self.windows:
            case "layers":
                return keys.may_hold("layer_types", "sliding_attention")
            case "config":
                return keys.may_be_set("sliding_window")
            case "none":
                return False


@dataclass(frozen=True)
class FamilyFacts:
    """One line of the table.

    Attributes:
        shape: Reads the sizes from the hub's config.
        matrices: Matrices of a block, in the order of the module: name, input, and output.
        adapter_targets: Ends of the names of matrices that have an adapter by default.
        per_head: Attributes of the attention module that tensor parallel ranks divide among themselves.
        heads_first: Whether one matrix of queries, keys and values has the rows of one head together, so that its rows
            can be dealt out as they are, and not all heads of the queries together.
        composed_norm: Whether a norm is composed of several kernels, and keeps its normalised input as well.
        biased_scores: Whether attention adds a bias to its scores, for which kernels and a ring of ranks have no room.
        dropout: Config key of attention's dropout, with transformers' default.
        norms: Number of norms in a block over the width of the stream.
        shared_axes: Mesh axes along which ranks may share a block; a test compares each with one rank alone.
        predicts: Labels: the next token; hidden tokens, by an encoder; or a target behind an encoder's text.
        rows_beside: Returns the number of rows in a message between stages that are no tokens of the text.
        experts: The experts that a router chooses for each token: another rounding may choose others. None without.
        slicing: Slicing by transformers' pipeline plan; None for a family that is written out.
    """

    shape: Callable[[ConfigKeys], ModelShape]
    matrices: tuple[tuple[str, Feed, Width], ...]
    adapter_targets: tuple[str, ...]
    per_head: tuple[str, ...] = ("num_heads",)
    heads_first: bool = False
    composed_norm: bool = False
    biased_scores: bool = False
    dropout: tuple[str, float] = ("attention_dropout", 0.0)
    norms: int = 2
    shared_axes: frozenset[SharedAxis] = frozenset({"tp", "cp"})
    predicts: Literal["next", "hidden", "target"] = "next"
    rows_beside: Callable[[ConfigKeys], int] = no_rows
    experts: ExpertsRule | None = None
    slicing: SlicingRule | None = None
