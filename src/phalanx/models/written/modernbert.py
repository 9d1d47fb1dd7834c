"""ModernBERT: an encoder with rotary positions, gated MLPs, and windows in two layers of three."""

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask

from phalanx.models.family import CAUSAL, AttentionPattern
from phalanx.models.written.bert import EncoderFamily

_MASKS = {
    "full_attention": create_bidirectional_mask,
    "sliding_attention": create_bidirectional_sliding_window_mask,
}


class ModernBert(EncoderFamily):
    """The order of ``ModernBertForMaskedLM.forward``."""

    model_type = "modernbert"
    prefix = "model"
    trunk = "model"
    blocks = "layers"
    first_parts = ("embeddings",)
    last_parts = ("final_norm",)
    embedding_weight = "model.embeddings.tok_embeddings.weight"
    attention_inputs = ("attn.Wqkv",)
    feed_forward_inputs = ("mlp.Wi",)
    head = "decoder"
    scoring = ("head", "decoder")
    # what configs of the hub had before `layer_types` and `rope_parameters`
    old_keys = ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta", "reference_compile")

    def find_objection(self, hub_config: Any) -> str | None:
        """Refuse layers of an unknown kind, and logits of hidden tokens alone."""
        strange = sorted({*hub_config.layer_types} - {*_MASKS})
        if strange:
            return f"layer_types: found {strange[0]!r}; stages carry {' and '.join(_MASKS)}"
        if hub_config.sparse_prediction:
            return "sparse_prediction = true: stages give logits of every token; set it to false"
        return None

    def restore_buffers(self, trunk: Any, hub_config: Any) -> None:
        with torch.device("cpu"):
            trunk.rotary_emb = type(trunk.rotary_emb)(config=hub_config)

    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Look the tokens up, then norm and dropout."""
        hidden: Tensor = trunk.embeddings(input_ids=ids)
        return hidden

    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        ids = pattern.token_positions(hidden.shape[1], hidden.device, before)
        kinds = dict.fromkeys(hub_config.layer_types)
        return {
            "attention_mask": {
                kind: _MASKS[kind](config=hub_config, inputs_embeds=hidden, attention_mask=None) for kind in kinds
            },
            "position_embeddings": {kind: trunk.rotary_emb(hidden, ids, kind) for kind in kinds},
        }

    def block_context(self, hub_config: Any, context: dict[str, Any], layer: int) -> dict[str, Any]:
        """Take the mask and the tables of the block's type."""
        return {key: by_type[hub_config.layer_types[layer]] for key, by_type in context.items()}

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        normed: Tensor = trunk.final_norm(hidden)
        return normed
