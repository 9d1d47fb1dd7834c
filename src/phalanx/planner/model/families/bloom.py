"""Bloom: positions as a bias on the scores, which have no fused kernel."""

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families.facts import FamilyFacts
from phalanx.planner.model.shape import ModelShape, plain_shape


def _bloom_shape(keys: ConfigKeys) -> ModelShape:
    hidden, vocab = keys.read_size("hidden_size", "n_embed"), keys.read_size("vocab_size")
    heads, head_dim = keys.read_heads(hidden, "n_head", "num_attention_heads")
    return plain_shape(
        layers=keys.read_size("n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        ffn=4 * hidden,
        vocab=vocab,
        tied=keys.read_flag("tie_word_embeddings", True),
        tables=vocab * hidden + 2 * hidden,
        final=2 * hidden,
        saved=2,
        fused=False,
    )


BLOOM = FamilyFacts(
    shape=_bloom_shape,
    matrices=(
        ("self_attention.query_key_value", "first", "all"),
        ("self_attention.dense", "mixed", "stream"),
        ("mlp.dense_h_to_4h", "second", "inner"),
        ("mlp.dense_4h_to_h", "inner", "stream"),
    ),
    adapter_targets=("query_key_value",),
    heads_first=True,
    biased_scores=True,
)
