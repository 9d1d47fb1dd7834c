"""Causal language models cut into pipeline stages; torch loads with the first name that needs it."""

import importlib
from typing import TYPE_CHECKING, Any

from phalanx.models.config import (
    PACKAGED_MODELS,
    AdapterConfig,
    Attention,
    LoraConfig,
    ModelConfig,
    PrefixConfig,
    SpfConfig,
)
from phalanx.models.layout import StageSpec, partition

if TYPE_CHECKING:
    from phalanx.models.attention import CAUSAL, AttentionPattern
    from phalanx.models.build import (
        StageRow,
        build_empty_stage,
        build_stage,
        estimate_costs,
        parameter_names,
        parameter_shapes,
        stage_table,
        trained_shapes,
    )
    from phalanx.models.digest import weights_digest
    from phalanx.models.families import FAMILIES, parse_hub_config
    from phalanx.models.family import Family
    from phalanx.models.source import ModelSource, open_model
    from phalanx.models.spf import add_spf
    from phalanx.models.stage import StageModule, tie

__all__ = [
    "CAUSAL",
    "FAMILIES",
    "PACKAGED_MODELS",
    "AdapterConfig",
    "Attention",
    "AttentionPattern",
    "Family",
    "LoraConfig",
    "ModelConfig",
    "ModelSource",
    "PrefixConfig",
    "SpfConfig",
    "StageModule",
    "StageRow",
    "StageSpec",
    "add_spf",
    "build_empty_stage",
    "build_stage",
    "estimate_costs",
    "open_model",
    "parameter_names",
    "parameter_shapes",
    "parse_hub_config",
    "partition",
    "stage_table",
    "tie",
    "trained_shapes",
    "weights_digest",
]

_HOMES = {
    "CAUSAL": "attention",
    "AttentionPattern": "attention",
    "FAMILIES": "families",
    "Family": "family",
    "ModelSource": "source",
    "StageModule": "stage",
    "StageRow": "build",
    "add_spf": "spf",
    "build_empty_stage": "build",
    "build_stage": "build",
    "estimate_costs": "build",
    "open_model": "source",
    "parameter_names": "build",
    "parameter_shapes": "build",
    "parse_hub_config": "families",
    "stage_table": "build",
    "tie": "stage",
    "trained_shapes": "build",
    "weights_digest": "digest",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'phalanx.models' has no attribute {name!r}")
    return getattr(importlib.import_module(f"phalanx.models.{_HOMES[name]}"), name)
