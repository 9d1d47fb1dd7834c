"""Tiny configs of every family that is cut by transformers' pipeline plan, with the variants that change its order."""

from typing import Any

from tiny_models import LAYERS, VOCAB

from phalanx.planner.model.families import FAMILIES

WINDOW = 5
"""Tokens that a layer with a sliding window sees; rows in the tests have more than three times as many."""

_COMMON: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    # ids above the vocabulary, as the big defaults have, are no rows of the embedding
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD_DIM = {"head_dim": 8}
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_OWN: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, **_MIXED},
    "ernie4_5": {**_HEAD_DIM, "use_bias": True},
    "exaone4": _MIXED,
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": _HEAD_DIM,
    "gemma2": {**_HEAD_DIM, **_MIXED, "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.5},
    "gemma3_text": {**_HEAD_DIM, **_MIXED, "query_pre_attn_scalar": 8},
    "glm": _HEAD_DIM,
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "helium": _HEAD_DIM,
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {**_HEAD_DIM, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo": {"clip_qkv": 0.5},
    "olmo3": _MIXED,
    "olmoe": {"clip_qkv": 0.5, "num_experts": 4, "num_experts_per_tok": 2},
    "phi": {"qk_layernorm": True},
    "phi3": {"sliding_window": WINDOW, "original_max_position_embeddings": 64},
    "qwen2": {"use_sliding_window": True, **_MIXED},
    "qwen2_moe": {
        "use_sliding_window": True,
        **_MIXED,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3": {**_HEAD_DIM, "use_sliding_window": True, **_MIXED},
    "qwen3_moe": {
        **_HEAD_DIM,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "seed_oss": {**_HEAD_DIM, "residual_dropout": 0.0, "attention_dropout": 0.0},
    "smollm3": {"use_sliding_window": True, "sliding_window": WINDOW, "no_rope_layer_interval": 2},
    "starcoder2": {"sliding_window": WINDOW},
}

PLANNED = {name: {"model_type": name, **_COMMON, **_OWN.get(name, {})} for name in FAMILIES if FAMILIES[name].slicing}
"""By the hub's ``model_type``; windows shorter than the rows wherever a family has them."""
# each of its query heads has keys and values of its own
PLANNED["gpt_neox"].pop("num_key_value_heads")

NO_WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": None},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "qwen3": {"use_sliding_window": False, "layer_types": None},
    "starcoder2": {"sliding_window": None},
}
"""The same families with tokens that see all before them."""

OTHERWISE: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": False, "attention_bias": True},
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text": {"final_logit_softcapping": 0.5, "attn_logit_softcapping": 3.0},
    "flex_olmo": {"norm_topk_prob": True, "attention_bias": True},
    "olmoe": {"norm_topk_prob": True, "clip_qkv": None},
    "qwen2_moe": {"norm_topk_prob": True, "qkv_bias": False},
    "gpt_neox": {"use_parallel_residual": False, "attention_bias": False},
    "phi": {"qk_layernorm": False},
    "smollm3": {"use_sliding_window": False, "no_rope_layers": [1, 0, 0, 1]},
}
"""Options that change the order of a family's operations."""

DROPOUTS: dict[str, dict[str, float]] = {
    # its blocks have none
    "ernie4_5": {},
    "gpt_neox": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "phi": {"embd_pdrop": 0.2, "resid_pdrop": 0.2, "attention_dropout": 0.2},
    "phi3": {"resid_pdrop": 0.2, "attention_dropout": 0.2},
    "seed_oss": {"residual_dropout": 0.2, "attention_dropout": 0.2},
    "starcoder2": {"embedding_dropout": 0.2, "residual_dropout": 0.2, "attention_dropout": 0.2},
}


MIXTURES = sorted(name for name, facts in FAMILIES.items() if facts.experts is not None)
"""The families in which a router chooses experts for each token."""


def dropout_of(name: str) -> dict[str, float]:
    """Shares of what is dropped in training, in all places that the family has."""
    return DROPOUTS.get(name, {"attention_dropout": 0.2})
