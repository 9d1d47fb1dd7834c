"""Layouts that cannot work are refused before any process starts, with the reason and the nearest that does."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.errors import ConfigError
from phalanx.models import AttentionKind
from phalanx.parallel.config import OF_SHARED_GRADIENTS, SHARED_GRADIENTS, ParallelConfig
from phalanx.parallel.model.compiled import why_no_compiler
from phalanx.parallel.tensor.tensor_plans import plan_of
from phalanx.planner import SCHEDULES, Recipe, describe_refusal, nearest_valid_layout, shape_of
from phalanx.planner.model.families import FAMILIES
from phalanx.planner.model.optimizers import OPTIMIZERS

_END_STAGES = 2
"""Stages with an embedding or a head."""


@dataclass(frozen=True)
class StepWorkload:
    """The workload of one step.

    Attributes:
        batch_size: Sequences of one step, all ranks together.
        microbatches: Parts that each copy's sequences are cut into.
        adapted: Layers that adapters are asked for, empty for the usual ones; None where all parameters are trained.
        attention: Name of the attention kernel.
        has_prefix: Whether virtual tokens come before the tokens of every block.
        num_prompt_tokens: Virtual tokens come before the text, in what crosses between stages.
        is_quantized: Frozen matrices are kept in few bits.
    """

    batch_size: int
    microbatches: int
    sequence_length: int
    adapted: tuple[str, ...] | None = None
    optimizer: str = "adamw"
    device: str = "cpu"
    attention: str = "sdpa"
    attends: AttentionKind = "causal"
    has_prefix: bool = False
    num_prompt_tokens: int = 0
    is_quantized: bool = False


def check_layout(config: ParallelConfig, hub_config: Mapping[str, Any], load: StepWorkload) -> None:
    """Refuse a layout that cannot train a model."""
    shape = shape_of(hub_config, "model config")
    recipe = Recipe(load.batch_size, load.sequence_length, load.microbatches)
    reason = describe_refusal(config.planned_layout, shape, recipe)
    if reason is not None:
        best = nearest_valid_layout(config.planned_layout, shape, recipe)
        advice = "no layout works" if best is None else f"the nearest that works is {best}"
        raise ConfigError(f"parallel: {reason}; {advice}")
    for reason in _our_reasons(config, hub_config, load):
        raise ConfigError(f"parallel: {reason}")


def _our_reasons(config: ParallelConfig, hub_config: Mapping[str, Any], load: StepWorkload) -> Iterator[str]:
    yield from _about_the_model(config, hub_config, load)
    yield from _about_exchanges(config, hub_config, load)
    selective = config.activation_checkpointing == "selective" and config.zero >= SHARED_GRADIENTS
    if hub_config.get("output_router_logits") and selective:
        yield (
            f'output_router_logits = true: zero={config.zero} with activation_checkpointing = "selective" cannot '
            'compute the loss of a router again behind its block; take "full" or "none", or zero 0 or 1'
        )
    if config.context == "ring" and load.attention == "eager":
        yield (
            'context = "ring": attention = "eager" asks for no fused kernel, and parts of a ring are joined by what a '
            'fused one knows; take attention = "sdpa", or context = "ulysses"'
        )
    if hub_config.get("output_router_logits") and config.compile:
        yield (
            "output_router_logits = true: the losses of routers are read between the parts of a block, which "
            "compile = true joins; set one of the two to false"
        )
    if config.context == "ring" and config.cp > 1 and load.attends != "causal":
        yield (
            f'context = "ring": its kernels know no mask, and {load.attends} attention is one; take context = '
            '"ulysses", or causal rows'
        )
    if OPTIMIZERS[load.optimizer].is_whole and (config.tp > 1 or config.zero >= SHARED_GRADIENTS):
        state = "a scale for many numbers" if OPTIMIZERS[load.optimizer].in_bytes else "rows and columns"
        yield (
            f"tp={config.tp} zero={config.zero}: {load.optimizer} keeps {state} of whole matrices, and ranks would "
            'have slices; set tp to 1 and zero to 0 or 1, or take optimizer.kind = "adamw"'
        )
    if load.has_prefix and (config.cp > 1 or config.compile):
        yield (
            f'cp={config.cp} compile={config.compile}: virtual tokens of kind = "ptuning" come before whole sequences, '
            "in blocks as they are written; set cp to 1 and compile to false"
        )
    if load.num_prompt_tokens and (max(config.tp, config.pp, config.cp) > 1 or config.compile):
        yield (
            f"tp={config.tp} pp={config.pp} cp={config.cp} compile={config.compile}: the virtual tokens of kind = "
            '"prompt_encoder" join the embedding, which ranks would divide with the sequence, and ranks behind it '
            'would have nothing to train; set tp, pp and cp to 1 and compile to false, or take kind = "ptuning"'
        )
    if load.is_quantized and (config.tp > 1 or config.zero >= SHARED_GRADIENTS or config.compile):
        yield (
            f"tp={config.tp} zero={config.zero} compile={config.compile}: matrices of model.adapter.quantize are "
            "packed whole and widened by kernels of their own; set tp to 1, zero to 0 or 1 and compile to false"
        )
    lacking = why_no_compiler(load.device) if config.compile else None
    if lacking is not None:
        yield f"compile: {lacking}"


def _about_exchanges(config: ParallelConfig, hub_config: Mapping[str, Any], load: StepWorkload) -> Iterator[str]:
    if config.sequence_parallel and FAMILIES[str(hub_config["model_type"])].experts is not None:
        yield (
            "sequence_parallel = true: routers choose experts for whole sequences, which ranks would have parts of; "
            "set it to false"
        )
    if config.sequence_parallel and load.sequence_length % (config.cp * config.tp):
        yield (
            f"sequence_parallel: cp={config.cp} * tp={config.tp} does not divide a sequence of "
            f"{load.sequence_length} tokens; change one of them"
        )
    if config.gradient_compression in OF_SHARED_GRADIENTS and load.device != "cpu":
        yield (
            f'gradient_compression = "{config.gradient_compression}": rounded numbers go straight from rank to rank, '
            f'which they do on CPUs alone, and the device is {load.device}; set it to "none"'
        )


def _about_the_model(config: ParallelConfig, hub_config: Mapping[str, Any], load: StepWorkload) -> Iterator[str]:
    family = str(hub_config.get("model_type"))
    rows = plan_of(family).rows if config.tp > 1 and family in FAMILIES else ()
    stray = [target for target in load.adapted or () if any(f".{row}".endswith(f".{target}") for row in rows)]
    if stray:
        yield (
            f"tp={config.tp}: adapters on {', '.join(stray)}, of whose inputs each rank has a part, are not cut; take "
            f"{', '.join(plan_of(family).columns)}, or set tp to 1"
        )
    if config.zero >= SHARED_GRADIENTS and FAMILIES[family].predicts == "target":
        yield (
            f"zero={config.zero}: all blocks of {family} read what its first one learns of positions, and ranks would "
            "have slices of it outside of that block; set zero to 0 or 1"
        )
    if config.pp > 1 and SCHEDULES[config.schedule].splits_backward and FAMILIES[family].predicts == "target":
        yield (
            f'schedule = "{config.schedule}": all blocks of a stage of {family} add one bias to their scores, and a '
            'backward pass in two halves would go through it twice; take "1f1b", "gpipe" or "interleaved"'
        )
    num_stages = config.pp * SCHEDULES[config.schedule].chunks
    has_views = family == "opt" or bool(hub_config.get("output_router_logits"))
    if num_stages > _END_STAGES and SCHEDULES[config.schedule].splits_backward and has_views:
        yield (
            f'schedule = "{config.schedule}": torch cannot halve the backward pass of a stage of {family} that has '
            f'neither embedding nor head, and {num_stages} stages have some; take "1f1b", "gpipe" or "interleaved"'
        )
    cuts_itself = hub_config.get("slow_but_exact") and hub_config.get("pretraining_tp", 1) > 1
    if cuts_itself and (config.tp > 1 or config.cp > 1):
        yield (
            f"tp={config.tp} cp={config.cp}: slow_but_exact = true cuts matrices itself; set it to false in the "
            "model's config"
        )
