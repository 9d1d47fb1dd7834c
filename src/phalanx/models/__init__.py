"""Causal language models cut into pipeline stages; torch loads with the first name that needs it."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.models.config import (
    AdapterConfig,
    Attention,
    AttentionKind,
    LoraConfig,
    ModelConfig,
    PrefixConfig,
    PromptEncoderConfig,
    Quantization,
    SlicedAdapter,
    SpfConfig,
    rows_before,
    without_path,
)
from phalanx.models.layout import StageSpec, partition

if TYPE_CHECKING:
    from phalanx.models.adapters.prompt import encoded_prompt
    from phalanx.models.adapters.spf import add_spf
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
    from phalanx.models.families import FAMILIES, adopt_family, made_one_by_one, parse_hub_config, shared_hub_config
    from phalanx.models.family import CAUSAL, MARKED_KINDS, AttentionPattern, Family, with_marks
    from phalanx.models.source import ModelSource, open_model
    from phalanx.models.stage import StageModule, add_embedding_noise, tie

__all__ = [
    "CAUSAL",
    "FAMILIES",
    "MARKED_KINDS",
    "AdapterConfig",
    "Attention",
    "AttentionKind",
    "AttentionPattern",
    "Family",
    "LoraConfig",
    "ModelConfig",
    "ModelSource",
    "PrefixConfig",
    "PromptEncoderConfig",
    "Quantization",
    "SlicedAdapter",
    "SpfConfig",
    "StageModule",
    "StageRow",
    "StageSpec",
    "add_embedding_noise",
    "add_spf",
    "adopt_family",
    "build_empty_stage",
    "build_stage",
    "encoded_prompt",
    "estimate_costs",
    "made_one_by_one",
    "open_model",
    "parameter_names",
    "parameter_shapes",
    "parse_hub_config",
    "partition",
    "rows_before",
    "shared_hub_config",
    "stage_table",
    "tie",
    "trained_shapes",
    "weights_digest",
    "with_marks",
    "without_path",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
