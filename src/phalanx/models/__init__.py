"""Causal language models cut into pipeline stages; torch loads with the first name that needs it."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names
from phalanx.models.config import (
    AdapterConfig as AdapterConfig,
    Attention as Attention,
    AttentionKind as AttentionKind,
    LoraConfig as LoraConfig,
    ModelConfig as ModelConfig,
    PrefixConfig as PrefixConfig,
    PromptEncoderConfig as PromptEncoderConfig,
    Quantization as Quantization,
    SlicedAdapter as SlicedAdapter,
    SpfConfig as SpfConfig,
    rows_before as rows_before,
    without_path as without_path,
)
from phalanx.models.layout import StageSpec as StageSpec, partition_layers as partition_layers

if TYPE_CHECKING:
    from phalanx.models.adapters.prompt import encoded_prompt as encoded_prompt
    from phalanx.models.adapters.spf import add_spf as add_spf
    from phalanx.models.build import (
        StageRow as StageRow,
        build_empty_stage as build_empty_stage,
        build_stage as build_stage,
        estimate_costs as estimate_costs,
        parameter_names as parameter_names,
        parameter_shapes as parameter_shapes,
        stage_table as stage_table,
        trained_shapes as trained_shapes,
    )
    from phalanx.models.digest import weights_digest as weights_digest
    from phalanx.models.families import (
        FAMILIES as FAMILIES,
        adopt_family as adopt_family,
        made_one_by_one as made_one_by_one,
        parse_hub_config as parse_hub_config,
        shared_hub_config as shared_hub_config,
    )
    from phalanx.models.family import (
        CAUSAL as CAUSAL,
        MARKED_KINDS as MARKED_KINDS,
        AttentionPattern as AttentionPattern,
        Family as Family,
        with_marks as with_marks,
    )
    from phalanx.models.source import ModelSource as ModelSource, open_model as open_model
    from phalanx.models.stage import (
        StageModule as StageModule,
        add_embedding_noise as add_embedding_noise,
        run_block as run_block,
        tie_head as tie_head,
    )


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
