"""BERT: an encoder with learned positions, and a head that transforms before it scores."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM
from transformers.masking_utils import create_bidirectional_mask

from phalanx.models.family import CAUSAL, AttentionPattern, Family


class EncoderFamily(Family):
    """What encoders have in common: every token sees every other, and hidden tokens are predicted."""

    attention_kinds = frozenset({"bidirectional"})

    def whole_model(self, hub_config: Any, **options: Any) -> Any:
        """As `Family` says, with the head of masked language models."""
        return AutoModelForMaskedLM.from_config(hub_config, dtype=torch.float32, trust_remote_code=False, **options)


class Bert(EncoderFamily):
    """The order of ``BertForMaskedLM.forward``; all tokens are of one segment, as in texts that are packed."""

    model_type = "bert"
    prefix = "bert"
    trunk = "bert"
    blocks = "encoder.layer"
    first_parts = ("embeddings",)
    last_parts = ()
    embedding_weight = "bert.embeddings.word_embeddings.weight"
    attention_inputs = ("attention.self.query", "attention.self.key", "attention.self.value")
    feed_forward_inputs = ("intermediate.dense",)
    head = "cls.predictions.decoder"
    scoring = ("cls",)

    def find_objection(self, hub_config: Any) -> str | None:
        """Refuse models that are no encoder."""
        if hub_config.is_decoder or hub_config.add_cross_attention:
            return "is_decoder or add_cross_attention = true: stages carry its encoder alone; set both to false"
        return None

    def max_positions(self, hub_config: Any) -> int | None:
        """Return the rows of the table of positions."""
        return int(hub_config.max_position_embeddings)

    def restore_buffers(self, trunk: Any, hub_config: Any) -> None:
        """Count positions, and put every token into the first segment."""
        if isinstance(trunk.embeddings, torch.nn.Module) and hasattr(trunk.embeddings, "word_embeddings"):
            positions = torch.arange(hub_config.max_position_embeddings).expand((1, -1))
            trunk.embeddings.position_ids = positions
            trunk.embeddings.token_type_ids = torch.zeros(positions.size(), dtype=torch.int64)

    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Add tokens, segment and positions, then norm and dropout."""
        hidden: Tensor = trunk.embeddings(input_ids=ids)
        return hidden

    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        return {
            "attention_mask": create_bidirectional_mask(config=hub_config, inputs_embeds=hidden, attention_mask=None)
        }

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        """Return the last block's output: its own norm was the last."""
        return hidden
