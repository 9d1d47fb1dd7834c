"""OPT: positions in a table with two rows more, and a token table that may be narrow."""

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families.facts import FamilyFacts
from phalanx.planner.model.shape import ModelShape, plain_shape

_OFFSET = 2
"""Rows of the position table beyond its positions."""


def _opt_shape(keys: ConfigKeys) -> ModelShape:
    hidden, vocab = keys.read_size("hidden_size"), keys.read_size("vocab_size")
    heads, head_dim = keys.read_heads(hidden, "num_attention_heads")
    positions = keys.read_size("max_position_embeddings")
    narrow = keys.read_size("word_embed_proj_dim", default=hidden)
    project = 0 if narrow == hidden else narrow * hidden
    affine = keys.read_flag("layer_norm_elementwise_affine", True)
    last_norm = keys.read_flag("do_layer_norm_before", True) and not keys.read_flag("_remove_final_layer_norm", False)
    return plain_shape(
        layers=keys.read_size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        ffn=keys.read_size("ffn_dim"),
        vocab=vocab,
        max_positions=positions,
        tied=keys.read_flag("tie_word_embeddings", True),
        tables=vocab * narrow + (positions + _OFFSET) * hidden + project,
        final=project + (2 * hidden if last_norm and affine else 0),
        biased=keys.read_flag("enable_bias", True),
        norms=4 * hidden if affine else 0,
        features=narrow,
        saved=keys.saved_tensors("activation_function", "relu"),
    )


OPT = FamilyFacts(
    shape=_opt_shape,
    matrices=(
        ("self_attn.k_proj", "first", "shared"),
        ("self_attn.v_proj", "first", "shared"),
        ("self_attn.q_proj", "first", "queries"),
        ("self_attn.out_proj", "mixed", "stream"),
        ("fc1", "second", "inner"),
        ("fc2", "inner", "stream"),
    ),
    adapter_targets=("q_proj", "v_proj"),
)
