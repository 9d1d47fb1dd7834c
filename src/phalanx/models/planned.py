"""Families that are cut as transformers' own pipeline plan says; `phalanx.planner` has a line for each."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from phalanx.errors import ModelError
from phalanx.models.config_keys import OLD_KEYS
from phalanx.models.family import CAUSAL, AttentionPattern, Family, attention_mask
from phalanx.models.routing import RouterBalance
from phalanx.planner.model.families import FAMILIES, SlicingRule

ROUTER = "mlp.gate"
"""The module of a block that gives logits of experts, their scores, and which are asked."""
_MLP = ".mlp."
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _experts_objection(hub_config: Any) -> str | None:
    """Refuse blocks without experts among others, and more experts asked than there are."""
    if getattr(hub_config, "mlp_only_layers", None) or getattr(hub_config, "decoder_sparse_step", 1) != 1:
        return "mlp_only_layers or decoder_sparse_step: stages carry blocks that all have experts; leave both out"
    count, asked = hub_config.num_experts, hub_config.num_experts_per_tok
    if not 1 <= asked <= count:
        return f"num_experts_per_tok {asked} of num_experts {count}; lower it"
    return None


class FamilyByPlan(Family):
    """The order that the ``forward`` of models with a pipeline plan has.

    Embeddings, then the parts that the plan names before the blocks; masks, one for each type of layer; rotary
    tables; blocks; the parts behind them. What a model does beside is in the family's line of facts.

    Args:
        model_type: The hub's name of a family that has such a line.
    """

    def __init__(self, model_type: str) -> None:
        facts = FAMILIES[model_type]
        self.model_type = model_type
        self._slicing = facts.slicing or SlicingRule()
        self.prefix = self.trunk = self._slicing.trunk
        self.past_key = self._slicing.past_key
        self._experts = facts.experts
        self._stored_names = dict(self._slicing.stored_names)
        self.old_keys = (*OLD_KEYS, *self._slicing.further_keys)
        self.attention_inputs = tuple(name for name, feed, _ in facts.matrices if feed == "first")
        self.feed_forward_inputs = tuple(name for name, feed, _ in facts.matrices if feed == "second")

    @property
    def blocks(self) -> str:
        return self._pipeline_plan[1]

    @property
    def first_parts(self) -> tuple[str, ...]:
        return self._pipeline_plan[0]

    @property
    def last_parts(self) -> tuple[str, ...]:
        return self._pipeline_plan[2]

    @property
    def embedding_weight(self) -> str:
        return f"{self.trunk}.{self.first_parts[0]}.weight"

    def choose_kernel(self, requested: str) -> str:
        """Return ``eager`` where transformers has no other attention."""
        return "eager" if self._slicing.plain_attention else requested

    def find_objection(self, hub_config: Any) -> str | None:
        """Refuse layers of an unknown kind, and options that the family's line refuses."""
        for key, carried in self._slicing.refused:
            value = getattr(hub_config, key, carried)
            if value != carried:
                return f"{key} = {value}: stages cannot carry it; set it to {carried}"
        strange = sorted({*self._layer_types(hub_config)} - {_FULL, _SLIDING})
        if strange:
            return f"layer_types: found {strange[0]!r}; stages carry {_FULL} and {_SLIDING}"
        heads, shared = hub_config.num_attention_heads, getattr(hub_config, "num_key_value_heads", None)
        if shared is not None and (shared < 1 or heads % shared):
            return f"num_key_value_heads {shared} does not divide num_attention_heads {heads}; change one"
        return None if self._experts is None else _experts_objection(hub_config)

    def hub_name(self, name: str) -> str:
        if self._experts is not None:
            name = name.replace(_MLP, f".{self._experts.block}.")
        return self._stored_names.get(name, name)

    def expert_pieces(self, name: str) -> tuple[str, ...]:
        """Name the matrices of single experts, which the hub's files have and transformers' modules join."""
        layer, _, matrix = name.rpartition(f"{_MLP}experts.")
        if self._experts is None or not layer:
            return ()
        gate, up, down = self._experts.pieces
        pieces = {"gate_up_proj": (gate, up), "down_proj": (down,)}.get(matrix, ())
        return tuple(f"{layer}.{self._experts.block}.experts.{{}}.{piece}.weight" for piece in pieces)

    def router_balance(self, hub_config: Any, share: float) -> RouterBalance | None:
        """Weigh the loss as transformers does, where the config asks for it by ``output_router_logits``."""
        if self._experts is None or not (hub_config.output_router_logits and share):
            return None
        weight = hub_config.router_aux_loss_coef * share / hub_config.num_hidden_layers
        return RouterBalance(ROUTER, hub_config.num_experts, hub_config.num_experts_per_tok, weight)

    def restore_buffers(self, trunk: Any, hub_config: Any) -> None:
        """Recompute rotary frequencies, on the CPU as transformers does, and the factor of scaled embeddings."""
        with torch.device("cpu"):
            trunk.rotary_emb = type(trunk.rotary_emb)(config=hub_config)
        embedding = getattr(trunk, self.first_parts[0])
        if not isinstance(embedding, nn.Embedding):
            return
        factor = getattr(embedding, "scalar_embed_scale", None)
        if (factor is not None) != self._slicing.scaled_embedding:
            raise ModelError(
                f"{self.model_type}: the embedding of the installed transformers "
                f"{'is not scaled, and should be' if factor is None else f'is scaled by {factor}, and should not be'}; "
                "install the release that Phalanx was tested with"
            )
        if factor is not None:
            setattr(embedding, "embed_scale", torch.tensor(factor))  # noqa: B010 - mypy knows no buffers of a module

    def embed(self, trunk: Any, ids: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL) -> Tensor:
        """Look the tokens up, then apply factor, dropout and the plan's other parts."""
        slicing = self._slicing
        hidden: Tensor = getattr(trunk, self.first_parts[0])(ids)
        if slicing.embedding_factor is not None:
            hidden = hidden * getattr(trunk.config, slicing.embedding_factor)
        for part in self.first_parts[1:]:
            hidden = getattr(trunk, part)(hidden)
        if slicing.embedding_dropout is not None:
            share = getattr(trunk.config, slicing.embedding_dropout)
            hidden = nn.functional.dropout(hidden, p=share, training=trunk.training)
        return hidden

    def context(
        self, trunk: Any, hub_config: Any, hidden: Tensor, before: int = 0, pattern: AttentionPattern = CAUSAL
    ) -> dict[str, Any]:
        """Give masks, and rotary cosines and sines, by type of layer where layers differ."""
        ids = pattern.token_positions(hidden.shape[1], hidden.device, before)
        masks = {
            kind: attention_mask(hub_config, hidden, before, pattern, windowed=kind == _SLIDING)
            for kind in dict.fromkeys(self._layer_types(hub_config))
        }
        if self._slicing.rotary_by_type:
            tables: Any = {kind: trunk.rotary_emb(hidden, ids, kind) for kind in masks}
        else:
            tables = dict.fromkeys(masks, trunk.rotary_emb(hidden, position_ids=ids))
        return {"attention_mask": masks, "position_embeddings": tables, "position_ids": ids, "use_cache": False}

    def block_context(self, hub_config: Any, context: dict[str, Any], layer: int) -> dict[str, Any]:
        kind = self._layer_types(hub_config)[layer]
        return context | {key: context[key][kind] for key in ("attention_mask", "position_embeddings")}

    def scale_logits(self, hub_config: Any, logits: Tensor) -> Tensor:
        if self._slicing.logits is None:
            return logits
        how, key = self._slicing.logits
        number: float | None = getattr(hub_config, key)
        if number is None:
            return logits
        match how:
            case "multiplied":
                return logits * number
            case "divided":
                return logits / number
            case "capped":
                return torch.tanh(logits / number) * number

    def finish(self, trunk: Any, hidden: Tensor) -> Tensor:
        for part in self.last_parts:
            hidden = getattr(trunk, part)(hidden)
        return hidden

    def layer_windows(self, hub_config: Any) -> list[int | None]:
        return [int(hub_config.sliding_window) if kind == _SLIDING else None for kind in self._layer_types(hub_config)]

    def _layer_types(self, hub_config: Any) -> list[str]:
        match self._slicing.windows:
            case "layers":
                return list(hub_config.layer_types)
            case "config":
                kind = _FULL if hub_config.sliding_window is None else _SLIDING
            case _:
                kind = _FULL
        return [kind] * int(hub_config.num_hidden_layers)

    @cached_property
    def _pipeline_plan(self) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
        """Parts before the blocks, the list of blocks, and parts behind them."""
        if self._slicing.plan is not None:
            return self._slicing.plan
        plan = getattr(CONFIG_MAPPING[self.model_type], "base_model_pp_plan", None) or {}
        names = list(plan)
        blocks = [name for name in names if "attention_mask" in plan[name][0]]
        if len(blocks) != 1:
            raise ModelError(
                f"{self.model_type}: the installed transformers has no pipeline plan for it; install the release that "
                "Phalanx was tested with"
            )
        index = names.index(blocks[0])
        return tuple(names[:index]), blocks[0], tuple(names[index + 1 :])
