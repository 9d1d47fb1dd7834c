"""The matrices of a block, by the names of transformers' modules."""

from dataclasses import dataclass
from typing import Literal

from phalanx.planner.model.shape import ModelShape

Feed = Literal["first", "mixed", "second", "inner"]
"""What a matrix multiplies: what the first norm gave, what attention gave, the second norm, or the MLP's middle."""

_TABLE: dict[str, tuple[tuple[str, Feed, str], ...]] = {
    "gpt2": (
        ("attn.c_attn", "first", "all"),
        ("attn.c_proj", "mixed", "stream"),
        ("mlp.c_fc", "second", "inner"),
        ("mlp.c_proj", "inner", "stream"),
    ),
    "opt": (
        ("self_attn.k_proj", "first", "shared"),
        ("self_attn.v_proj", "first", "shared"),
        ("self_attn.q_proj", "first", "queries"),
        ("self_attn.out_proj", "mixed", "stream"),
        ("fc1", "second", "inner"),
        ("fc2", "inner", "stream"),
    ),
    "bloom": (
        ("self_attention.query_key_value", "first", "all"),
        ("self_attention.dense", "mixed", "stream"),
        ("mlp.dense_h_to_4h", "second", "inner"),
        ("mlp.dense_4h_to_h", "inner", "stream"),
    ),
    "llama": (
        ("self_attn.q_proj", "first", "queries"),
        ("self_attn.k_proj", "first", "shared"),
        ("self_attn.v_proj", "first", "shared"),
        ("self_attn.o_proj", "mixed", "stream"),
        ("mlp.gate_proj", "second", "inner"),
        ("mlp.up_proj", "second", "inner"),
        ("mlp.down_proj", "inner", "stream"),
    ),
}


@dataclass(frozen=True)
class Linear:
    """One matrix of a block.

    Attributes:
        name: In the block.
        feed: What it multiplies.
        inputs: Their width.
        outputs: Width of the product.
    """

    name: str
    feed: Feed
    inputs: int
    outputs: int

    @property
    def is_row(self) -> bool:
        """Whether each tensor parallel rank has a part of its inputs, and not of its outputs."""
        return self.feed in ("mixed", "inner")


def linears(shape: ModelShape) -> tuple[Linear, ...]:
    """Return the matrices of one block, in the order of the module."""
    queries, shared = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inputs: dict[Feed, int] = {"first": shape.hidden, "mixed": queries, "second": shape.hidden, "inner": shape.ffn}
    outputs = {
        "all": queries + 2 * shared,
        "queries": queries,
        "shared": shared,
        "inner": shape.ffn,
        "stream": shape.hidden,
    }
    return tuple(Linear(name, feed, inputs[feed], outputs[out]) for name, feed, out in _TABLE[shape.family])


def block_tensors(shape: ModelShape) -> int:
    """Return how many tensors the parameters of one block are; a bias counts for all columns or for none."""
    matrices = linears(shape)
    biases = sum(not one.is_row for one in matrices) if shape.layer_split > shape.layer_matrix else 0
    return len(matrices) + biases + shape.layer_whole // shape.hidden
