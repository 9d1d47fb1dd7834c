"""Facts about the model families whose code is written here."""

import math

from phalanx.planner.model.config_keys import ConfigKeys, composed_by, saved_by
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


_BOTH_NORMS = 2


def _falcon_shape(keys: ConfigKeys) -> ModelShape:
    hidden, vocab = keys.read_size("hidden_size"), keys.read_size("vocab_size")
    heads, head_dim = keys.read_heads(hidden, "num_attention_heads")
    ffn = keys.read_size("ffn_hidden_size", default=4 * hidden)
    is_new, is_parallel = keys.read_flag("new_decoder_architecture", False), keys.read_flag("parallel_attn", True)
    shared_heads = keys.read_size("num_kv_heads", default=heads)
    kv_heads = shared_heads if is_new else 1 if keys.read_flag("multi_query", True) else heads
    norms = (
        _BOTH_NORMS
        if not is_parallel or (is_new and keys.read_size("num_ln_in_parallel_attn", default=_BOTH_NORMS) == _BOTH_NORMS)
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
