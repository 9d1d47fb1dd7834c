"""Llama: gated MLPs, RMS norms, key and value heads that queries share."""

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families.facts import FamilyFacts
from phalanx.planner.model.shape import ModelShape


def _shape(keys: ConfigKeys) -> ModelShape:
    hidden, vocab, ffn = keys.size("hidden_size"), keys.size("vocab_size"), keys.size("intermediate_size")
    heads, head_dim = keys.heads(hidden, "num_attention_heads")
    head_dim = keys.size("head_dim", default=head_dim)
    kv_heads = keys.size("num_key_value_heads", default=heads)
    queries, shared = heads * head_dim, kv_heads * head_dim
    matrix = 2 * hidden * queries + 2 * hidden * shared + 3 * hidden * ffn
    attention_bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    tied = keys.flag("tie_word_embeddings", False)
    return ModelShape(
        family="llama",
        layers=keys.size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        max_positions=None,
        gated=True,
        tied=tied,
        ffn_saved=keys.saved("hidden_act", "silu") + 2,
        ffn_composed=0,
        fused=True,
        layer_matrix=matrix,
        layer_split=matrix + (queries + 2 * shared if attention_bias else 0) + (2 * ffn if mlp_bias else 0),
        layer_whole=2 * hidden + (hidden if attention_bias else 0) + (hidden if mlp_bias else 0),
        embedding=vocab * hidden,
        final=hidden,
        head=0 if tied else vocab * hidden,
        head_matrix=vocab * hidden,
    )


LLAMA = FamilyFacts(
    shape=_shape,
    matrices=(
        ("self_attn.q_proj", "first", "queries"),
        ("self_attn.k_proj", "first", "shared"),
        ("self_attn.v_proj", "first", "shared"),
        ("self_attn.o_proj", "mixed", "stream"),
        ("mlp.gate_proj", "second", "inner"),
        ("mlp.up_proj", "second", "inner"),
        ("mlp.down_proj", "inner", "stream"),
    ),
    adapter_targets=("q_proj", "v_proj"),
    per_head=(),
    composed_norm=True,
)
