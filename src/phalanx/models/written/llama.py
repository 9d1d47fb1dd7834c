"""Llama and what shares its architecture (SmolLM2): rotary positions, grouped key and value heads."""

from typing import Any

import torch
from torch import Tensor

from phalanx.models.family import CAUSAL, AttentionPattern, Family, attention_mask


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
        """Look the tokens up."""
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
        """Apply the final norm."""
        normed: Tensor = trunk.norm(hidden)
        return normed
