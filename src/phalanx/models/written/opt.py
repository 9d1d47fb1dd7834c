"""OPT: learned positions with an offset, norm before or after attention, optional narrow embedding."""

from typing import Any

import torch
from torch import Tensor

from phalanx.models.family import CAUSAL, AttentionPattern, Family, attention_mask


class Opt(Family):
    """The order of ``OPTDecoder.forward``."""

    model_type = "opt"
    prefix = "model"
    trunk = "model.decoder"
    blocks = "layers"
    first_parts = ("embed_tokens", "embed_positions", "project_in")
    last_parts = ("final_layer_norm", "project_out")
    embedding_weight = "model.decoder.embed_tokens.weight"
    # its decoder looks for no documents in the positions that it is given
    attention_kinds = frozenset({"causal", "prefix", "bidirectional"})
    attention_inputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    feed_forward_inputs = ("fc1",)

    def find_objection(self, hub_config: Any) -> str | None:
        """Refuse layers that are skipped at random: a stage of one layer would then do nothing."""
        if hub_config.layerdrop:
            return f"layerdrop = {hub_config.layerdrop} skips whole layers at random; set it to 0"
        return None

    def max_positions(self, hub_config: Any) -> int | None:
        """Return the number of positions without the offset."""
        return int(hub_config.max_position_embeddings)

    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Widen the token embedding where it is narrow, then add positions."""
        tokens = trunk.embed_tokens(ids)
        mask = torch.ones(ids.shape, device=ids.device)
        # one row of positions per sequence, as the whole model has: the gradient is summed in that order
        added = trunk.embed_positions(
            mask, 0, position_ids=pattern.token_positions(ids.shape[1], ids.device, before).expand(ids.shape)
        )
        if trunk.project_in is not None:
            tokens = trunk.project_in(tokens)
        hidden: Tensor = tokens + added
        return hidden

    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        return {"attention_mask": attention_mask(hub_config, hidden, before, pattern), "use_cache": False}

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        """Apply the final norm and the projection to the embedding's width, where there are any."""
        if trunk.final_layer_norm is not None:
            hidden = trunk.final_layer_norm(hidden)
        if trunk.project_out is not None:
            hidden = trunk.project_out(hidden)
        return hidden
