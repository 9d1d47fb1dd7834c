"""Falcon: one matrix for queries, keys and values, and one or two norms before both halves of a block."""

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families.facts import FamilyFacts
from phalanx.planner.model.shape import ModelShape

_BOTH = 2


def _falcon_shape(keys: ConfigKeys) -> ModelShape:
    hidden, vocab = keys.read_size("hidden_size"), keys.read_size("vocab_size")
    heads, head_dim = keys.read_heads(hidden, "num_attention_heads")
    ffn = keys.read_size("ffn_hidden_size", default=4 * hidden)
    is_new, is_parallel = keys.read_flag("new_decoder_architecture", False), keys.read_flag("parallel_attn", True)
    shared_heads = keys.read_size("num_kv_heads", default=heads)
    kv_heads = shared_heads if is_new else 1 if keys.read_flag("multi_query", True) else heads
    norms = (
        _BOTH
        if not is_parallel or (is_new and keys.read_size("num_ln_in_parallel_attn", default=_BOTH) == _BOTH)
        else 1
    )
    columns = (heads + 2 * kv_heads) * head_dim
    matrix = hidden * columns + hidden * hidden + 2 * hidden * ffn
    has_bias, tied = keys.read_flag("bias", False), keys.read_flag("tie_word_embeddings", True)
    return ModelShape(
        layers=keys.read_size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        tied=tied,
        ffn_saved=keys.saved_tensors("activation", "gelu"),
        layer_matrix=matrix,
        layer_split=matrix + (columns + ffn if has_bias else 0),
        layer_whole=2 * norms * hidden + (2 * hidden if has_bias else 0),
        embedding=vocab * hidden,
        final=2 * hidden,
        head=0 if tied else vocab * hidden,
        head_matrix=vocab * hidden,
    )


FALCON = FamilyFacts(
    shape=_falcon_shape,
    matrices=(
        ("self_attention.query_key_value", "first", "all"),
        ("self_attention.dense", "mixed", "stream"),
        ("mlp.dense_h_to_4h", "second", "inner"),
        ("mlp.dense_4h_to_h", "inner", "stream"),
    ),
    adapter_targets=("query_key_value",),
    per_head=(),
    norms=1,
    shared_axes=frozenset(),
)
