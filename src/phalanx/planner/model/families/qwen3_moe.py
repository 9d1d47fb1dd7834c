"""Qwen 3 with experts: of a block's experts a token asks some, and all are held."""

from dataclasses import replace

from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families.facts import SlicingRule
from phalanx.planner.model.families.planned import PLANNED
from phalanx.planner.model.shape import ModelShape

_DENSE = replace(PLANNED["qwen3"], defaults={"num_key_value_heads": 4}).family_facts


def _qwen3_moe_shape(keys: ConfigKeys) -> ModelShape:
    dense = _DENSE.shape(keys)
    inner, asked = (
        keys.read_size("moe_intermediate_size", default=768),
        keys.read_size("num_experts_per_tok", default=8),
    )
    experts, hidden = keys.read_size("num_experts", "num_local_experts", default=128), dense.hidden
    attention = dense.layer_matrix - 3 * hidden * dense.ffn
    router = hidden * experts
    return replace(
        dense,
        ffn=asked * inner,
        # what a token is multiplied with, and what is held
        layer_matrix=attention + router + asked * 3 * hidden * inner,
        layer_split=dense.layer_split - dense.layer_matrix + attention + router + experts * 3 * hidden * inner,
    )


QWEN3_MOE = replace(
    _DENSE,
    shape=_qwen3_moe_shape,
    matrices=_DENSE.matrices[:4],
    slicing=SlicingRule(refused=(("use_sliding_window", False),)),
    shared_axes=frozenset(),
    routed=True,
)
