"""The activations that a block keeps for its backward pass."""

from dataclasses import dataclass, replace

from phalanx.planner.layout import Layout
from phalanx.planner.model.adapter import Adapter, adapted_linears
from phalanx.planner.model.families import FAMILIES, Feed
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape


@dataclass(frozen=True)
class SavedPerToken:
    """Numbers that one block keeps for each token.

    Attributes:
        stream: Inputs of norms, in the precision of the residual stream.
        whole: Outputs of norms, which every tensor parallel rank has unless it is sequence parallel.
        split: Numbers between the matrix products, shared by the tensor parallel ranks.
        scores: Attention's probabilities, shared likewise; 0 with a fused kernel.
    """

    stream: int
    whole: int
    split: int
    scores: int


def kept_numbers(shape: ModelShape, recipe: Recipe) -> SavedPerToken:
    """Count the numbers that one block stores for each token, without dropout.

    Source: what autograd saves in transformers' blocks, which a test counts; for GPT-2 with a fused activation it is
    Korthikanti et al. 2022, section 4.1, less its dropout masks: 16 numbers for each column of the stream. Of families
    that are cut by transformers' pipeline plans it is an estimate, which a test holds to 15 % of the count.
    """
    hidden, queries = shape.hidden, shape.heads * shape.head_dim
    # an RMS norm is composed: it keeps its input, the normalised input and its output
    facts = FAMILIES[shape.family]
    stream, width = facts.norms * (2 if facts.composed_norm else 1) * hidden, facts.norms * hidden
    fused = recipe.fused_attention and shape.fused
    # a fused kernel keeps one number a head; without one, keys and values are repeated for the heads that share them
    attention = 2 * queries + 2 * shape.kv_heads * shape.head_dim + shape.heads if fused else 4 * queries
    if shape.head_norms:
        attention += (2 if facts.composed_norm else 1) * (queries + shape.kv_heads * shape.head_dim)
    scores = 0 if fused else shape.heads * recipe.sequence_length
    saved = shape.ffn_saved - (shape.ffn_composed if recipe.fused_activation else 0)
    everything = SavedPerToken(stream, width, attention + saved * shape.ffn, scores)
    if recipe.adapter is None:
        return everything
    return beside_frozen(everything, shape, recipe.adapter, is_fused=fused, inner=saved)


def block_bytes(shape: ModelShape, layout: Layout, recipe: Recipe) -> int:
    """Bytes that one block of one rank keeps for one microbatch."""
    if recipe.checkpointing == "full":
        return _stream_bytes(shape, layout, recipe)
    if recipe.checkpointing == "selective":
        return _product_bytes(shape, layout, recipe)
    return _working_bytes(shape, layout, recipe)


def peak_bytes(shape: ModelShape, layout: Layout, recipe: Recipe) -> int:
    """Return the bytes beyond `block_bytes` in the backward pass of one block: recomputed tensors and gradients."""
    tokens = microbatch_tokens(layout, recipe)
    widest = max(shape.ffn // layout.tp, shape.hidden)
    again = max(0, _working_bytes(shape, layout, recipe) - block_bytes(shape, layout, recipe))
    return again + 2 * tokens * widest * recipe.inner_bytes


def head_bytes(shape: ModelShape, layout: Layout, recipe: Recipe) -> int:
    """Bytes around the loss of one microbatch: logits, their fp32 log-probabilities, and the gradients of both."""
    columns = -(-shape.vocab // layout.tp)
    return microbatch_tokens(layout, recipe) * columns * (2 * recipe.inner_bytes + 2 * 4)


def microbatch_tokens(layout: Layout, recipe: Recipe) -> int:
    """Tokens of one microbatch on one rank."""
    sequences = recipe.sequences / (layout.dp * recipe.microbatches)
    return round(sequences * recipe.sequence_length / layout.cp)


def boundary_bytes(shape: ModelShape, layout: Layout, recipe: Recipe) -> int:
    """Return the bytes that one stage sends to the next for one microbatch."""
    share = layout.tp if recipe.sequence_parallel else 1
    return microbatch_tokens(layout, recipe) * shape.hidden * recipe.stream_bytes // share


def _working_bytes(shape: ModelShape, layout: Layout, recipe: Recipe) -> int:
    saved = kept_numbers(shape, recipe)
    between = layout.tp if recipe.sequence_parallel else 1
    split = (saved.split + saved.scores) / layout.tp
    numbers = saved.stream * recipe.stream_bytes / between + (saved.whole / between + split) * recipe.inner_bytes
    return round(microbatch_tokens(layout, recipe) * numbers)


def _product_bytes(shape: ModelShape, layout: Layout, recipe: Recipe) -> int:
    """The block's input, what its matrix products and attention gave, and nothing between them."""
    tokens = microbatch_tokens(layout, recipe)
    queries, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = 2 * queries + 2 * shared + shape.ffn * (2 if shape.gated else 1)
    inner += kept_numbers(shape, recipe).scores
    # the two products that end in the stream are whole on every rank until they are summed
    widths_sum = 2 * shape.hidden
    if recipe.adapter is not None:
        thin = adapted_linears(shape, recipe.adapter)
        inner += sum(linear.outputs for linear in thin)
        widths_sum += recipe.adapter.rank * len(thin)
    products = round(tokens * (inner / layout.tp + widths_sum) * recipe.inner_bytes)
    return _stream_bytes(shape, layout, recipe) + products


def _stream_bytes(shape: ModelShape, layout: Layout, recipe: Recipe) -> int:
    between = layout.tp if recipe.sequence_parallel else 1
    return microbatch_tokens(layout, recipe) * shape.hidden * recipe.stream_bytes // between


_NORMS = 2
_DROPPED = 2
"""Tensors of an adapter's own that dropping inputs leaves: which ones, and what is left of them."""


def beside_frozen(
    kept: SavedPerToken, shape: ModelShape, adapter: Adapter, *, is_fused: bool, inner: int
) -> SavedPerToken:
    """Return the stored numbers of a block whose weights are frozen.

    The input of a frozen matrix is stored for its gradient alone, and so is dropped; except the input of an adapter,
    and tensors with another use: a fused kernel needs its own result, relu likewise. A norm's frozen scale needs its
    input and not the scaled tensor.

    Args:
        inner: Number of stored tensors that have the MLP's inner width.
    """
    widths: dict[Feed, int] = {
        "first": shape.hidden,
        "second": shape.hidden,
        "mixed": 0 if is_fused else shape.heads * shape.head_dim,
        "inner": shape.ffn if inner > 1 else 0,
    }
    needed: dict[Feed, int] = dict.fromkeys(widths, 0)
    targets = adapted_linears(shape, adapter)
    for linear in targets:
        needed[linear.feed] = needed[linear.feed] + _DROPPED * linear.inputs if adapter.drops else widths[linear.feed]
    return replace(
        kept,
        stream=_NORMS * shape.hidden,
        whole=needed["first"] + needed["second"] + adapter.rank * len(targets),
        split=kept.split - widths["mixed"] - widths["inner"] + needed["mixed"] + needed["inner"],
    )
