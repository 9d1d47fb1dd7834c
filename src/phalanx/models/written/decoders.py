"""Code of small decoder families."""

from typing import Any

import torch
from torch import Tensor

from phalanx.models.family import CAUSAL, AttentionPattern, Family, attention_mask


class Bloom(Family):
    """The order of ``BloomModel.forward``."""

    model_type = "bloom"
    prefix = "transformer"
    trunk = "transformer"
    blocks = "h"
    first_parts = ("word_embeddings", "word_embeddings_layernorm")
    last_parts = ("ln_f",)
    embedding_weight = "transformer.word_embeddings.weight"
    attention_inputs = ("self_attention.query_key_value",)
    past_key = "layer_past"
    feed_forward_inputs = ("mlp.dense_h_to_4h",)
    old_keys = ("n_embed",)
    attention_kinds = frozenset({"causal"})

    def choose_kernel(self, requested: str) -> str:
        """Return ``eager``: transformers has no other attention for this family."""
        return "eager"

    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Embed and normalise; there are no positions."""
        hidden: Tensor = trunk.word_embeddings_layernorm(trunk.word_embeddings(ids))
        return hidden

    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        """Give the mask and the bias ``[batch * heads, 1, before + seq]``."""
        batch, seq = hidden.shape[:2]
        all_tokens = torch.ones(batch, before + seq, device=hidden.device, dtype=torch.long)
        alibi = trunk.build_alibi_tensor(all_tokens, hub_config.num_attention_heads, dtype=hidden.dtype)
        return {
            "attention_mask": attention_mask(hub_config, hidden, before, pattern),
            "alibi": alibi,
            "use_cache": False,
        }

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        normed: Tensor = trunk.ln_f(hidden)
        return normed


class Gpt2(Family):
    """The order of ``GPT2Model.forward``."""

    model_type = "gpt2"
    prefix = "transformer"
    trunk = "transformer"
    blocks = "h"
    first_parts = ("wte", "wpe", "drop")
    last_parts = ("ln_f",)
    embedding_weight = "transformer.wte.weight"
    attention_inputs = ("attn.c_attn",)
    feed_forward_inputs = ("mlp.c_fc",)
    fan_in_fan_out = True

    def find_objection(self, hub_config: Any) -> str | None:
        if hub_config.add_cross_attention:
            return "add_cross_attention = true needs an encoder, which a stage has not; set it to false"
        return None

    def max_positions(self, hub_config: Any) -> int | None:
        """Return the number of rows of the position embedding."""
        return int(hub_config.max_position_embeddings)

    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Add token and position embeddings, then drop out."""
        hidden: Tensor = trunk.drop(
            trunk.wte(ids) + trunk.wpe(pattern.token_positions(ids.shape[1], ids.device, before))
        )
        return hidden

    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        return {"attention_mask": attention_mask(hub_config, hidden, before, pattern), "use_cache": False}

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        normed: Tensor = trunk.ln_f(hidden)
        return normed


class Llama(Family):
    """The order of ``LlamaModel.forward``."""

    model_type = "llama"
    prefix = "model"
    trunk = "model"
    blocks = "layers"
    first_parts = ("embed_tokens",)
    last_parts = ("norm",)
    embedding_weight = "model.embed_tokens.weight"
    attention_inputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    feed_forward_inputs = ("mlp.gate_proj", "mlp.up_proj")
    old_keys = ("rope_theta",)

    def find_objection(self, hub_config: Any) -> str | None:
        """Refuse groups of heads that do not come out even."""
        heads, shared = hub_config.num_attention_heads, hub_config.num_key_value_heads
        if shared < 1 or heads % shared:
            return f"num_key_value_heads {shared} does not divide num_attention_heads {heads}; change one"
        return None

    def restore_buffers(self, trunk: Any, hub_config: Any) -> None:
        """Recompute the rotary frequencies, on the CPU as transformers does when it loads a model."""
        with torch.device("cpu"):
            trunk.rotary_emb = type(trunk.rotary_emb)(config=hub_config)

    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        hidden: Tensor = trunk.embed_tokens(ids)
        return hidden

    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        """Give the mask and the rotary cosines and sines, ``[1, seq, head]`` each."""
        ids = pattern.token_positions(hidden.shape[1], hidden.device, before)
        return {
            "attention_mask": attention_mask(hub_config, hidden, before, pattern),
            "position_embeddings": trunk.rotary_emb(hidden, position_ids=ids),
            "position_ids": ids,
            "use_cache": False,
        }

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        normed: Tensor = trunk.norm(hidden)
        return normed
