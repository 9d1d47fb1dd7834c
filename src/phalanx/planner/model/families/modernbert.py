"""ModernBERT: an encoder with gated MLPs, one matrix for queries, keys and values, and no norm before its first one."""

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families.facts import FamilyFacts
from phalanx.planner.model.shape import ModelShape


def _modernbert_shape(keys: ConfigKeys) -> ModelShape:
    hidden, vocab, ffn = (
        keys.read_size("hidden_size"),
        keys.read_size("vocab_size"),
        keys.read_size("intermediate_size"),
    )
    heads, head_dim = keys.read_heads(hidden, "num_attention_heads")
    norm = 2 * hidden if keys.read_flag("norm_bias", False) else hidden
    attention_bias, mlp_bias = keys.read_flag("attention_bias", False), keys.read_flag("mlp_bias", False)
    tied = keys.read_flag("tie_word_embeddings", True)
    matrix = 4 * hidden * hidden + 3 * hidden * ffn
    transform = hidden * hidden + (hidden if keys.read_flag("classifier_bias", False) else 0) + norm
    return ModelShape(
        layers=keys.read_size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        gated=True,
        tied=tied,
        ffn_saved=keys.saved_tensors("hidden_activation", "gelu") + 2,
        layer_matrix=matrix,
        layer_split=matrix + (3 * hidden if attention_bias else 0) + (2 * ffn if mlp_bias else 0),
        layer_whole=2 * norm + (hidden if attention_bias else 0) + (hidden if mlp_bias else 0),
        # the norm of the embeddings stands for the one that the first block lacks
        embedding=vocab * hidden,
        final=norm + transform + (vocab if keys.read_flag("decoder_bias", True) else 0),
        head=0 if tied else vocab * hidden,
        head_matrix=vocab * hidden,
    )


MODERNBERT = FamilyFacts(
    shape=_modernbert_shape,
    matrices=(
        ("attn.Wqkv", "first", "all"),
        ("attn.Wo", "mixed", "stream"),
        ("mlp.Wi", "second", "both"),
        ("mlp.Wo", "inner", "stream"),
    ),
    adapter_targets=("Wqkv",),
    per_head=(),
    shared_axes=frozenset(),
    predicts="hidden",
)
