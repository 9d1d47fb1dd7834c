"""The shape of a model: its sizes, exact parameter counts and the head that its config tells."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only language model; all counts are exact.

    Attributes:
        family: The hub's ``model_type``; the reader of a config fills it in.
        hidden: Width of the residual stream.
        ffn: Inner width of an MLP.
        max_positions: Longest sequence in tokens; None where positions are computed.
        gated: The MLP has a gate: three matrices instead of two.
        tied: The head shares the embedding's matrix.
        ffn_saved: Tensors of the MLP's inner width that a block keeps for its backward pass.
        ffn_composed: Part of `ffn_saved` that is there because the activation function is composed of many kernels.
        fused: The family can run an attention kernel that keeps no scores.
        layer_matrix: Parameters of one block's matrices.
        layer_split: Parameters of one block that tensor parallel shares: matrices and biases of columns.
        layer_whole: Parameters of one block that every tensor parallel rank has: norms and biases of rows.
        embedding: Parameters of token and position tables, with norms and projections next to them.
        final: Parameters between the last block and the head.
        head: Parameters of an untied head; 0 where it is tied.
        head_matrix: Parameters that the head multiplies with, tied or not.
        attention_dropout: Share of attention's weights that training drops.
        head_norms: Queries and keys have norms.
        experts: Experts of a block, of which tensor parallel ranks have some each; 0 without.
    """

    family: str = ""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int | None = None
    gated: bool = False
    tied: bool
    ffn_saved: int
    ffn_composed: int = 0
    fused: bool = True
    layer_matrix: int
    layer_split: int
    layer_whole: int
    embedding: int
    final: int
    head: int
    head_matrix: int
    attention_dropout: float = 0.0
    head_norms: bool = False
    windows: bool = False
    experts: int = 0

    def input_width(self, feed: str) -> int:
        """Return the input width of a matrix of a block, by `families.facts.Feed`."""
        return {"first": self.hidden, "mixed": self.heads * self.head_dim, "second": self.hidden, "inner": self.ffn}[
            feed
        ]

    def output_width(self, width: str) -> int:
        """Return the output width of a matrix of a block, by `families.facts.Width`."""
        queries, shared = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "all": queries + 2 * shared,
            "queries": queries,
            "shared": shared,
            "inner": self.ffn,
            "both": 2 * self.ffn,
            "stream": self.hidden,
        }[width]

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        return self.layer_split + self.layer_whole

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return self.layers * self.layer_parameters + self.embedding + self.final + self.head


def plain_shape(
    *,
    layers: int,
    hidden: int,
    heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
    max_positions: int | None = None,
    tied: bool,
    tables: int,
    final: int,
    saved: int,
    composed: int = 0,
    fused: bool = True,
    biased: bool = True,
    norms: int | None = None,
    features: int | None = None,
) -> ModelShape:
    """Return a shape with one key and value head for each query head and an MLP without a gate."""
    matrix = 4 * hidden * hidden + 2 * hidden * ffn
    head_matrix = vocab * (features or hidden)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        max_positions=max_positions,
        tied=tied,
        ffn_saved=saved,
        ffn_composed=composed,
        fused=fused,
        layer_matrix=matrix,
        layer_split=matrix + (3 * hidden + ffn if biased else 0),
        layer_whole=(2 * hidden if biased else 0) + (4 * hidden if norms is None else norms),
        embedding=tables,
        final=final,
        head=0 if tied else head_matrix,
        head_matrix=head_matrix,
    )


HeadKind = Literal["lm", "score", "lm_and_score"]

VALUE_HEAD = "value_head"
"""The key of a config that says that a language model has a score for each token as well."""
_SCORES = "ForSequenceClassification"


def head_kind(config: Mapping[str, Any]) -> HeadKind:
    """Return the head that a hub config describes.

    The hub's own way of saying that a model scores texts is a class for sequence classification with one label.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list | tuple) and names else None
    labels = config.get("num_labels") or len(config.get("id2label") or ())
    if isinstance(name, str) and name.endswith(_SCORES) and labels == 1:
        return "score"
    return "lm_and_score" if config.get(VALUE_HEAD) is True else "lm"


def with_head(shape: ModelShape, kind: HeadKind) -> ModelShape:
    """Return the shape of a model with another head on the same blocks."""
    if kind == "lm":
        return shape
    features = shape.head_matrix // shape.vocab
    if kind == "score":
        return replace(shape, tied=False, head=features, head_matrix=features)
    return replace(shape, head=shape.head + features, head_matrix=shape.head_matrix + features)
