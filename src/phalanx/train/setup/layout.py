"""A run file and a model to the plan that every party gets: the stages' layers, and everything settled beforehand."""

from collections.abc import Iterator, Mapping
from typing import Any

from phalanx.config import digest_config
from phalanx.errors import ConfigError
from phalanx.models import (
    FAMILIES,
    MARKED_KINDS,
    ModelSource,
    PrefixConfig,
    PromptEncoderConfig,
    StageSpec,
    estimate_costs,
    partition_layers,
    without_path,
)
from phalanx.models.config import LoraConfig, SpfConfig
from phalanx.models.layout import check_length
from phalanx.objectives import objective_of
from phalanx.pipeline import StageRange, StepPlan
from phalanx.planner.model.optimizers import OPTIMIZERS
from phalanx.split import cut_model
from phalanx.train.config import DomainRun, PipelineRun, RankedRun, RunConfig, SplitPipelineRun, StagedRun
from phalanx.train.setup.preflight import require_extras
from phalanx.train.setup.row_attention import attends_in_documents, attention_kind, attention_of

_HEADS = ("classifier", "summary")
"""Beginnings of config keys of heads that no stage has."""


def check_private_model(run: StagedRun, source: ModelSource) -> None:
    """Return where one row moves a step's sum by its own gradient alone."""
    if not isinstance(run, PipelineRun) or run.privacy is None:
        return
    config, kind = source.hub_config_dict, source.hub_config.model_type
    if run.model.adapter is None and getattr(source.hub_config, "tie_word_embeddings", False):
        raise ConfigError(
            f"[privacy] excludes tied weights without an adapter: {kind} has its embedding in the first and in the "
            "last stage, each would clip a part of its gradient, and a row could exceed its bound; train an "
            'adapter (model.adapter.kind = "lora"), or set tie_word_embeddings = false'
        )
    if FAMILIES[kind].facts.experts is not None:
        raise ConfigError(
            f"[privacy] excludes experts in stages: {kind} balances them over the present rows, so a row would "
            "change the contribution of others; use a model without experts, or [parallel]"
        )
    for name, share in _config_numbers(config):
        if "drop" in name and not name.startswith(_HEADS) and share > 0:
            raise ConfigError(
                f"[privacy] excludes dropout in stages: the model has {name} = {share}, auditors draw it by the "
                "index of a microbatch, which would reveal the number of rows before it; set it to 0 in the "
                "model's config"
            )


def check_router_losses(run: RankedRun, source: ModelSource) -> None:
    """Refuse the losses of routers where nothing adds them."""
    section = (
        "[privacy]"
        if run.privacy is not None
        else "[deepspeed]"
        if isinstance(run, DomainRun) and run.deepspeed is not None
        else None
    )
    if section is not None and getattr(source.hub_config, "output_router_logits", False):
        raise ConfigError(
            f"{section} adds no losses of routers: each is of all rows of a microbatch together; set "
            "output_router_logits = false in the model's config"
        )


def _config_numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Return every number of a model's config by its key, nested configs included."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _config_numbers(value)
        elif isinstance(value, int | float):
            yield name, value


def cut_stages(run: StagedRun, source: ModelSource) -> tuple[StageSpec, ...]:
    """The stages' layers, balanced over the processes by estimated cost unless the run file gives them.

    The owner has the first and the last stage, so both together get about as much work as one worker. The stages of a
    split are those of the enclave's part.
    """
    embedding, head = estimate_costs(source.hub_config)
    stages, layers = run.pipeline.stages, run.pipeline.layers
    if not isinstance(run, SplitPipelineRun):
        return partition_layers(source.num_layers, stages, layers, embedding, head, ends_in_one_process=True)
    front, back = cut_model(source.num_layers, run.split.cut)
    # clients embed
    return partition_layers(back.num_layers, stages, layers, 0.0, head, ends_in_one_process=True, front=front.end_layer)


def check_head(run: RunConfig, source: ModelSource) -> None:
    """Check that the model gives for each token the output that the objective reads."""
    head = objective_of(run.train.objective).head
    if source.head_kind != head:
        raise ConfigError(
            f'model.head: the model returns "{source.head_kind}" for each token, but train.objective = '
            f'"{run.train.objective_kind}" needs "{head}"; set model.head = "{head}"'
        )
    if run.train.samples is not None and head == "score":
        raise ConfigError("train.samples: a model with a scoring head cannot write texts; remove it")
    if run.train.samples is not None and source.family.facts.predicts != "next":
        raise ConfigError(
            f"train.samples: {source.family.model_type} has an encoder, and only decoders can continue texts; remove it"
        )


def make_plan(run: StagedRun, source: ModelSource) -> StepPlan:
    """Everything that a party must know to build and run its stages."""
    if FAMILIES[source.hub_config.model_type].facts.experts is not None and run.guard.classes == "mixed":
        raise ConfigError(
            f'guard.classes = "mixed": {source.hub_config.model_type} has experts, and another rounding may choose '
            'other experts, which looks like a lie; set guard.classes = "one"'
        )
    require_extras(run)
    check_length(run.data.sequence_length, getattr(source.hub_config, "max_position_embeddings", None))
    check_virtual_tokens(run, source)
    check_private_model(run, source)
    _check_masters(run, source)
    _check_few_bits(run)
    _check_exact(run, source)
    return StepPlan(
        family=run.model.family,
        run_digest=digest_config(run),
        hub_config=source.hub_config_dict,
        hidden_size=source.hidden_size,
        stages=tuple(StageRange(first_layer=s.first_layer, end_layer=s.end_layer) for s in cut_stages(run, source)),
        schedule=run.pipeline.schedule,
        microbatches=run.train.microbatches,
        microbatch_size=run.train.batch_size // run.train.microbatches,
        sequence_length=run.data.sequence_length,
        total_steps=run.train.steps,
        seed=run.train.seed,
        precision="fp32" if run.train.precision == "fp16" else run.train.precision,
        numerics=run.train.numerics,
        device=run.train.device,
        attention=run.model.attention if run.train.numerics == "float" else "eager",
        activation_checkpointing=run.model.activation_checkpointing,
        adapter=without_path(run.model.sliced_adapter),
        optimizer=run.optimizer,
        guard=run.guard,
        objective=run.learned_objective,
        document_attention=attends_in_documents(run, source),
        neftune_alpha=run.train.neftune_alpha,
        attention_kind=attention_of(run, source),
    )


def check_virtual_tokens(run: RunConfig, source: ModelSource) -> None:
    """Refuse virtual tokens for which a table of positions has no room, and rows that they cannot come before."""
    adapter, longest = run.model.adapter, source.family.max_positions(source.hub_config)
    if not isinstance(adapter, PrefixConfig | PromptEncoderConfig):
        return
    kind = attention_kind(run, source)
    if kind != "causal":
        raise ConfigError(
            f'model.adapter.kind = "{adapter.kind}": virtual tokens need causal rows, but this run has {kind} '
            'attention; set kind = "lora"'
        )
    if isinstance(adapter, PromptEncoderConfig) and run.train.neftune_alpha is not None:
        raise ConfigError(
            f'model.adapter.kind = "{adapter.kind}" with train.neftune_alpha: the noise applies to tokens of a '
            "text, but the first ones here are virtual; remove one"
        )
    if longest is not None and run.data.sequence_length + adapter.tokens > longest:
        raise ConfigError(
            f"model.adapter.tokens = {adapter.tokens}: each takes a position, but data.sequence_length = "
            f"{run.data.sequence_length} leaves {longest - run.data.sequence_length} of the model's {longest}; "
            "lower one of the two"
        )


def _check_masters(run: StagedRun, source: ModelSource) -> None:
    """Refuse what stages with bf16 weights cannot do."""
    if run.train.precision != "bf16_weights":
        return
    shared = run.pipeline.layout is not None or bool(run.pipeline.layouts)
    faults = {
        'guard.classes = "mixed": its tolerance is known for float32 weights only; set "one"': (
            run.guard.classes == "mixed"
        ),
        "data.attention: document numbers accompany hidden states, but bf16 cannot represent them": (
            attends_in_documents(run, source)
        ),
        "a prefix in its rows: its end accompanies hidden states, but bf16 cannot represent it": (
            attention_of(run, source) in MARKED_KINDS
        ),
        "model.adapter.quantize: unpacked matrices would be rounded twice": run.model.base_quantization is not None,
        "pipeline.layout: ranks of a party divide float32 weights; remove it": shared,
    }
    for feature, holds in faults.items():
        if holds:
            raise ConfigError(f'train.precision = "bf16_weights" with {feature}; or use "bf16"')


def _check_exact(run: StagedRun, source: ModelSource) -> None:
    """Refuse models that exact arithmetic does not cover; other unsupported operators are refused when called."""
    if run.train.numerics == "float":
        return
    adapter = run.model.adapter
    faults = {
        f'train.precision = "{run.train.precision}": exact products are of float32 numbers; set "fp32"': (
            run.train.precision != "fp32"
        ),
        f'train.device = "{run.train.device}": no accelerator has been held to its bits yet; set "cpu"': (
            run.train.device != "cpu"
        ),
        f'optimizer.kind = "{run.optimizer.kind}": bitsandbytes rounds moments by its own kernels; set "adamw"': (
            run.optimizer.kind != "adamw"
        ),
        'guard.classes = "mixed": all parties compute the same bits, which are one class; set "one"': (
            run.guard.classes == "mixed"
        ),
        "pipeline.layout: ranks of a party sum floating-point numbers; remove it": (
            run.pipeline.layout is not None or bool(run.pipeline.layouts)
        ),
        f"model_type {source.hub_config.model_type}: products of experts have no law; take a model without experts": (
            FAMILIES[source.hub_config.model_type].facts.experts is not None
        ),
        "model.adapter.quantize: unpacking of nf4 has no law; remove it": run.model.base_quantization is not None,
        "model.adapter: norms of DoRA's and choices of spf's first values have no law; use plain lora": (
            isinstance(adapter, SpfConfig) or (isinstance(adapter, LoraConfig) and adapter.dora)
        ),
        "[rollouts]: texts are drawn by torch's own arithmetic; remove it": getattr(run, "rollouts", None) is not None,
        "[privacy]: noise of stages has no law; remove it": getattr(run, "privacy", None) is not None,
    }
    for feature, holds in faults.items():
        if holds:
            raise ConfigError(f'train.numerics = "{run.train.numerics}" with {feature}; or use numerics = "float"')


def _check_few_bits(run: StagedRun) -> None:
    """Refuse moments of a byte a number where bits are not kept."""
    if not OPTIMIZERS[run.optimizer.kind].in_bytes:
        return
    faults = {
        'guard.classes = "mixed": different rounding of a moment may change its byte; set "one"': (
            run.guard.classes == "mixed"
        ),
        "pipeline.layout: ranks of a party divide float32 moments; remove it": (
            run.pipeline.layout is not None or bool(run.pipeline.layouts)
        ),
    }
    for feature, holds in faults.items():
        if holds:
            raise ConfigError(f'optimizer.kind = "{run.optimizer.kind}" with {feature}; or use "adamw"')
