"""BERT: an encoder with norms behind attention and MLP, and a head that transforms before it scores."""

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families.facts import FamilyFacts
from phalanx.planner.model.shape import ModelShape, plain_shape


def _bert_shape(keys: ConfigKeys) -> ModelShape:
    hidden, vocab = keys.read_size("hidden_size"), keys.read_size("vocab_size")
    heads, head_dim = keys.read_heads(hidden, "num_attention_heads")
    positions = keys.read_size("max_position_embeddings")
    tied = keys.read_flag("tie_word_embeddings", True)
    return plain_shape(
        layers=keys.read_size("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        ffn=keys.read_size("intermediate_size"),
        vocab=vocab,
        max_positions=positions,
        tied=tied,
        # tokens, positions and segments, and the norm behind their sum
        tables=(vocab + positions + keys.read_size("type_vocab_size", default=2) + 2) * hidden,
        # the head's transform and its bias, of which an untied head has a second one
        final=hidden * hidden + 3 * hidden + vocab * (1 if tied else 2),
        saved=keys.saved_tensors("hidden_act", "gelu"),
    )


BERT = FamilyFacts(
    shape=_bert_shape,
    matrices=(
        ("attention.self.query", "first", "queries"),
        ("attention.self.key", "first", "shared"),
        ("attention.self.value", "first", "shared"),
        ("attention.output.dense", "mixed", "stream"),
        ("intermediate.dense", "second", "inner"),
        ("output.dense", "inner", "stream"),
    ),
    adapter_targets=("query", "value"),
    per_head=("num_attention_heads", "all_head_size"),
    dropout=("attention_probs_dropout_prob", 0.1),
    shared_axes=frozenset(),
    predicts="hidden",
)
