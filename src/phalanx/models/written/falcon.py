"""Falcon: attention and feed-forward side by side, one head of keys and values for all queries, as in PaLM."""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from phalanx.models.family import CAUSAL, AttentionPattern, Family, attention_mask


class Falcon(Family):
    """The order of ``FalconModel.forward``, for rotary positions."""

    model_type = "falcon"
    prefix = "transformer"
    trunk = "transformer"
    blocks = "h"
    first_parts = ("word_embeddings",)
    last_parts = ("ln_f",)
    embedding_weight = "transformer.word_embeddings.weight"
    attention_inputs = ("self_attention.query_key_value",)
    feed_forward_inputs = ("mlp.dense_h_to_4h",)
    past_key = "layer_past"
    # what configs of the hub had before `rope_parameters`
    old_keys = ("rope_theta", "n_embed")

    def find_objection(self, hub_config: Any) -> str | None:
        """Refuse positions by a bias of scores, and heads of keys and values that do not come out even."""
        if hub_config.alibi:
            return "alibi = true: stages carry rotary positions alone; set it to false"
        heads, shared = hub_config.num_attention_heads, hub_config.num_kv_heads
        if hub_config.new_decoder_architecture and (shared < 1 or heads % shared):
            return f"num_kv_heads {shared} does not divide num_attention_heads {heads}; change one"
        if not (hub_config.new_decoder_architecture or hub_config.multi_query) and shared != heads:
            return f"num_kv_heads {shared}: without multi_query each head has its own; set it to {heads}"
        return None

    def restore_buffers(self, trunk: Any, hub_config: Any) -> None:
        with torch.device("cpu"):
            trunk.rotary_emb = type(trunk.rotary_emb)(config=hub_config)

    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        hidden: Tensor = trunk.word_embeddings(ids)
        return hidden

    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        """Give the mask, which is always written out, and the rotary cosines and sines."""
        ids = pattern.token_positions(hidden.shape[1], hidden.device, before)
        if before == 0 and pattern.kind in ("causal", "documents"):
            mask = create_causal_mask(
                config=hub_config,
                inputs_embeds=hidden,
                attention_mask=None,
                past_key_values=None,
                position_ids=None if pattern.documents is None else ids,
                allow_is_causal_skip=False,
            )
        else:
            mask = attention_mask(hub_config, hidden, before, pattern)
        return {
            "alibi": None,
            "attention_mask": mask,
            "position_embeddings": trunk.rotary_emb(hidden, position_ids=ids),
            "position_ids": ids,
        }

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        normed: Tensor = trunk.ln_f(hidden)
        return normed
