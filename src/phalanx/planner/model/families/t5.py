"""T5: an encoder and a decoder that attends to it; positions are biases of scores, one table for each of both."""

import math

from phalanx.planner.model.config_keys import ConfigKeys, composed_by, saved_by
from phalanx.planner.model.families.facts import FamilyFacts
from phalanx.planner.model.shape import ModelShape

_SIDES = 2


def _t5_shape(keys: ConfigKeys) -> ModelShape:
    hidden, vocab, ffn = keys.read_size("d_model", "hidden_size"), keys.read_size("vocab_size"), keys.read_size("d_ff")
    heads, head_dim = keys.read_size("num_heads", "num_attention_heads"), keys.read_size("d_kv", "head_dim")
    encoder = keys.read_size("num_layers", "num_hidden_layers")
    decoder = keys.read_size("num_decoder_layers", default=encoder)
    parts = keys.read_word("feed_forward_proj", "relu").split("-")
    gated, activation = parts[0] == "gated", "gelu_new" if parts == ["gated", "gelu"] else parts[-1]
    attention = 4 * hidden * heads * head_dim
    matrix = attention + (3 if gated else 2) * hidden * ffn
    tied = keys.read_flag("scale_decoder_outputs", keys.read_flag("tie_word_embeddings", True))
    return ModelShape(
        layers=encoder + decoder,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        gated=gated,
        tied=tied,
        ffn_saved=saved_by(activation) + (2 if gated else 0),
        ffn_composed=composed_by(activation),
        layer_matrix=matrix,
        layer_split=matrix,
        layer_whole=2 * hidden,
        embedding=vocab * hidden + _SIDES * _num_buckets(keys) * heads,
        # an encoder's blocks are those that are counted one by one: what a decoder's have beside stands here
        final=_SIDES * hidden + decoder * (attention + hidden),
        head=0 if tied else vocab * hidden,
        head_matrix=vocab * hidden,
    )


def _num_buckets(keys: ConfigKeys) -> int:
    return keys.read_size("relative_attention_num_buckets", default=32)


def _extra_rows(keys: ConfigKeys) -> int:
    """Return the rows of a message that are no token of the text: the decoder's first, and the biases of one side."""
    heads, hidden = keys.read_size("num_heads", "num_attention_heads"), keys.read_size("d_model", "hidden_size")
    return 1 + math.ceil(_num_buckets(keys) * heads / hidden)


T5 = FamilyFacts(
    shape=_t5_shape,
    matrices=(
        ("layer.0.SelfAttention.q", "first", "queries"),
        ("layer.0.SelfAttention.k", "first", "shared"),
        ("layer.0.SelfAttention.v", "first", "shared"),
        ("layer.0.SelfAttention.o", "mixed", "stream"),
        ("DenseReluDense.wi", "second", "inner"),
        ("DenseReluDense.wo", "inner", "stream"),
    ),
    adapter_targets=("q", "v"),
    per_head=(),
    composed_norm=True,
    biased_scores=True,
    dropout=("dropout_rate", 0.1),
    shared_axes=frozenset(),
    predicts="target",
    rows_beside=_extra_rows,
)
