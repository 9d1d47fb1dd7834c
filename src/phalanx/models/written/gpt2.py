"""GPT-2: learned positions, fused attention weights stored ``[in, out]``."""

from typing import Any

from torch import Tensor

from phalanx.models.family import CAUSAL, AttentionPattern, Family, attention_mask


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
        """Refuse cross-attention."""
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
        """Give the mask."""
        return {"attention_mask": attention_mask(hub_config, hidden, before, pattern), "use_cache": False}

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        """Apply the final norm."""
        normed: Tensor = trunk.ln_f(hidden)
        return normed
