"""GPT-2: one matrix for queries, keys and values of all heads."""

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families.facts import FamilyFacts
from phalanx.planner.model.shape import ModelShape, plain_shape


def _gpt2_shape(keys: ConfigKeys) -> ModelShape:
    hidden, vocab = keys.read_size("n_embd", "hidden_size"), keys.read_size("vocab_size")
    heads, head_dim = keys.read_heads(hidden, "n_head", "num_attention_heads")
    positions = keys.read_size("n_positions", "max_position_embeddings")
    return plain_shape(
        layers=keys.read_size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        ffn=keys.read_size("n_inner", default=4 * hidden),
        vocab=vocab,
        max_positions=positions,
        tied=keys.read_flag("tie_word_embeddings", True),
        tables=(vocab + positions) * hidden,
        final=2 * hidden,
        saved=keys.saved_tensors("activation_function", "gelu_new"),
        composed=keys.composed_tensors("activation_function", "gelu_new"),
    )


GPT2 = FamilyFacts(
    shape=_gpt2_shape,
    matrices=(
        ("attn.c_attn", "first", "all"),
        ("attn.c_proj", "mixed", "stream"),
        ("mlp.c_fc", "second", "inner"),
        ("mlp.c_proj", "inner", "stream"),
    ),
    adapter_targets=("c_attn",),
    per_head=("num_heads", "split_size"),
    dropout=("attn_pdrop", 0.1),
)
