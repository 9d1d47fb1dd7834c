"""BLOOM: no position embedding, a linear bias on attention scores (ALiBi) instead."""

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
        """Apply the final norm."""
        normed: Tensor = trunk.ln_f(hidden)
        return normed
