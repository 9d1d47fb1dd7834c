"""Qwen 3 with experts: cut as transformers' plan says, with a router's loss in each block."""

from typing import Any

from phalanx.models.planned import FamilyByPlan
from phalanx.models.routing import RouterBalance


class Qwen3Moe(FamilyByPlan):
    """The order of ``Qwen3MoeModel.forward``; every block has experts."""

    # configs of the hub have it, and transformers' attention reads it, though its config class names it not
    old_keys = (*FamilyByPlan.old_keys, "head_dim")

    def __init__(self) -> None:
        super().__init__("qwen3_moe")

    def find_objection(self, hub_config: Any) -> str | None:
        """Refuse blocks without experts among others, and more experts asked than there are."""
        if hub_config.mlp_only_layers or hub_config.decoder_sparse_step != 1:
            return "mlp_only_layers or decoder_sparse_step: stages carry blocks that all have experts; leave both out"
        if not 1 <= hub_config.num_experts_per_tok <= hub_config.num_experts:
            asked = hub_config.num_experts_per_tok
            return f"num_experts_per_tok {asked} of num_experts {hub_config.num_experts}; lower it"
        return super().find_objection(hub_config)

    def expert_pieces(self, name: str) -> tuple[str, ...]:
        """Name the matrices of single experts, which the hub's files have and transformers' modules join."""
        layer, _, matrix = name.rpartition(".mlp.experts.")
        pieces = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(matrix, ())
        return tuple(f"{layer}.mlp.experts.{{}}.{piece}.weight" for piece in pieces)

    def router_balance(self, hub_config: Any, share: float) -> RouterBalance | None:
        """Weigh the loss as transformers does, where the config asks for it by ``output_router_logits``."""
        if not (hub_config.output_router_logits and share):
            return None
        weight = hub_config.router_aux_loss_coef * share / hub_config.num_hidden_layers
        return RouterBalance("mlp.gate", hub_config.num_experts, hub_config.num_experts_per_tok, weight)
