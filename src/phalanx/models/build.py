"""Stages made from a model directory, or empty ones made from the config alone."""

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from phalanx.errors import ModelError
from phalanx.models.adapters import draw_adapter, inject_adapter, is_adapter
from phalanx.models.adapters.lora import set_magnitudes
from phalanx.models.adapters.peft_files import first_values
from phalanx.models.adapters.quantized import quantize_blocks, quantized_layers
from phalanx.models.adapters.spf import choose_rows
from phalanx.models.config import AdapterConfig, Attention, LoraConfig, SpfConfig
from phalanx.models.families import TRANSFORMERS_REFUSALS, family_of, head_of, shared_hub_config
from phalanx.models.family import HEAD, SCORE, SCORE_WEIGHT, Family
from phalanx.models.layout import StageSpec
from phalanx.models.quiet import one_at_a_time, quiet_transformers
from phalanx.models.seeding import draw_score
from phalanx.models.source import ModelSource
from phalanx.models.stage import StageModule


def build_stage(
    source: ModelSource,
    spec: StageSpec,
    *,
    adapter: AdapterConfig | None,
    activation_checkpointing: bool,
    attention: Attention,
    seed: int,
    device: str = "cpu",
) -> StageModule:
    """Build one stage and read its own tensors, no others.

    Args:
        adapter: Adapters to add; their first values depend on `seed` and their names only.
        activation_checkpointing: Recompute each block in the backward pass.
        attention: Attention kernel; see ``Family.choose_kernel``.
        seed: Seed of the first values of adapters, and of a score head that the files have not.

    Returns:
        The stage in training mode with float32 parameters. A tied head that is built without the first stage
        holds its own copy of the embedding until ``tie`` joins them.

    Raises:
        ModelError: A tensor is missing or has another shape, the spec does not fit the model, peft is
            missing, or an adapter target does not exist.
    """
    stage = meta_stage(source.hub_config, spec, adapter, attention, activation_checkpointing)
    values, packed = _given_values(source, adapter), quantized_layers(stage)
    # sizes are the config's claim, and the config may be a stranger's: no memory before the files have them too
    source.check_shapes(_stored_parameters(stage, source, values))
    source.check_shapes({name: torch.empty(layer.file_shape, device="meta") for name, layer in packed.items()})
    _materialise_stage(stage, device)
    for name, layer in packed.items():
        # one matrix after the other: no more than one is in memory as it was
        layer.quantize_values(source.read_tensor(name))
    targets = _stored_parameters(stage, source, values)
    for name, parameter in stage.all_parameters().items():
        if name in values:
            parameter.detach().copy_(values[name])
        elif is_adapter(name):
            draw_adapter(name, parameter.detach(), seed)
        elif name == SCORE_WEIGHT and name not in targets:
            draw_score(name, parameter.detach(), seed)
    if stage.ties_head and spec.is_last:
        source.check_tied()
    source.load_into(targets)
    choose_rows(stage)
    if isinstance(adapter, LoraConfig) and not values:
        set_magnitudes(stage)
    return stage


def _stored_parameters(stage: StageModule, source: ModelSource, given: Collection[str]) -> dict[str, Tensor]:
    """Return the parameters that the model's files fill as they are, by name; a tied head by its embedding's."""
    quantized_ids = {id(value) for layer in quantized_layers(stage).values() for value in (layer.weight, layer.absmax)}
    stored = {
        name: parameter.detach()
        for name, parameter in stage.all_parameters().items()
        if id(parameter) not in quantized_ids
        and name not in given
        and not is_adapter(name)
        and (name != SCORE_WEIGHT or source.has_tensor(name))
    }
    if stage.ties_head and stage.family.head_weight in stored:
        stored[stage.family.embedding_weight] = stored.pop(stage.family.head_weight)
    return stored


def _given_values(source: ModelSource, adapter: AdapterConfig | None) -> dict[str, Tensor]:
    """What an adapter begins with, where a directory has it."""
    if adapter is None or isinstance(adapter, SpfConfig) or adapter.path is None:
        return {}
    return first_values(adapter, source.family, trained_shapes(source.hub_config, adapter))


def build_empty_stage(
    hub_config_dict: Mapping[str, Any],
    spec: StageSpec,
    *,
    adapter: AdapterConfig | None,
    activation_checkpointing: bool,
    attention: Attention,
    device: str = "cpu",
) -> StageModule:
    """Build one stage without reading any file; its parameters are to be filled from elsewhere.

    Names and shapes equal those of ``build_stage``. Values hold NaN, so that a value that is never filled shows at
    once. Tables that are computed from the config (rotary frequencies) are right.
    """
    if isinstance(adapter, SpfConfig):
        raise ModelError("model.adapter: spf chooses rows by the model's weights, and a stage without any has none")
    hub_config = shared_hub_config(hub_config_dict)
    stage = meta_stage(hub_config, spec, adapter, attention, activation_checkpointing)
    _materialise_stage(stage, device)
    for parameter in stage.parameters():
        # scales of integers are numbers, too
        parameter.detach().fill_(float("nan") if parameter.is_floating_point() else 0)
    return stage


def meta_stage(
    hub_config: Any,
    spec: StageSpec,
    adapter: AdapterConfig | None,
    attention: Attention = "sdpa",
    activation_checkpointing: bool = False,
) -> StageModule:
    """Build a stage that has names and shapes but no memory (the meta device)."""
    family = family_of(hub_config.model_type, "model config")
    layers = family.num_layers(hub_config)
    if spec.end_layer > layers or spec.is_last != (spec.end_layer == layers):
        raise ModelError(
            f"stage {spec.index} of {spec.num_stages} ends at layer {spec.end_layer}; the model has "
            f"{layers} layers, which the last stage alone must reach"
        )
    with one_at_a_time():
        model = _whole_model(hub_config, family, attention)
        stage = StageModule(model, family, spec, activation_checkpointing=activation_checkpointing)
    if adapter is not None:
        with quiet_transformers():
            inject_adapter(stage, adapter)
            if isinstance(adapter, LoraConfig) and adapter.quantize is not None:
                quantize_blocks(stage, adapter.quantize)
        # new as the adapter is, and of no use untrained
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or name == SCORE_WEIGHT)
    return stage


def parameter_names(hub_config: Any) -> list[str]:
    """Return the names of a whole model's parameters, a tied head left out."""
    return list(parameter_shapes(hub_config))


def parameter_shapes(hub_config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a whole model's parameters by name, a tied head left out."""
    return trained_shapes(hub_config, None)


def trained_shapes(
    hub_config: Any, adapter: AdapterConfig | None, spec: StageSpec | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of trained tensors by name, without a tied head: all parameters, or the adapter's alone.

    Args:
        spec: One stage; None for the whole model.
    """
    stage = meta_stage(hub_config, spec or _whole_spec(hub_config), adapter)
    trainable = stage.trainable_parameters().items()
    return {
        name: tuple(value.shape)
        for name, value in trainable
        if not (stage.ties_head and name == stage.family.head_weight)
    }


def _whole_spec(hub_config: Any) -> StageSpec:
    return StageSpec(0, 1, 0, family_of(hub_config.model_type, "model config").num_layers(hub_config))


class _Undrawn(TorchFunctionMode):
    """A mode that skips the drawing of first values: on the meta device there are none, and it takes most time."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__ and (args or "tensor" in named):
            # torch hands some of these on with every argument by name
            return args[0] if args else named["tensor"]
        return func(*args, **named)


_MODELS: dict[tuple[str, str], Any] = {}
_MAX_MODELS = 4


def _whole_model(hub_config: Any, family: Family, attention: Attention) -> Any:
    """Build a whole model on the meta device, or return the cached one of an equal config.

    transformers builds no layer alone, and a party builds stages again and again: its copies, a measurement of its
    class, and a copy more whenever roles change. A stage copies its own parts, so the model itself stays as it is.
    """
    key = (hub_config.to_json_string(use_diff=False), family.choose_kernel(attention))
    if key not in _MODELS:
        try:
            with quiet_transformers(), _Undrawn(), torch.device("meta"):
                model = family.whole_model(copy.deepcopy(hub_config), attn_implementation=key[1])
        except TRANSFORMERS_REFUSALS as exc:
            raise ModelError(f"model config: {family.model_type} cannot be built from it: {exc}") from exc
        _fit_head(model, hub_config)
        if len(_MODELS) == _MAX_MODELS:
            del _MODELS[next(iter(_MODELS))]
        _MODELS[key] = model
    return _MODELS[key]


def _fit_head(model: Any, hub_config: Any) -> None:
    kind = head_of(hub_config)
    if kind == "lm":
        return
    with torch.device("meta"):
        setattr(model, SCORE, nn.Linear(getattr(model, HEAD).in_features, 1, bias=False))
    if kind == "score":
        delattr(model, HEAD)


def _materialise_stage(stage: StageModule, device: str) -> None:
    """Give every parameter memory on `device`; a parameter that occurs twice stays one."""
    with one_at_a_time():
        _give_memory(stage, device)


def _give_memory(stage: StageModule, device: str) -> None:
    parameters: dict[int, nn.Parameter] = {}
    for module in stage.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in parameters:
                dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
                values = torch.empty(parameter.shape, dtype=dtype, device=device)
                parameters[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            setattr(module, leaf, parameters[id(parameter)])
    stage.family.restore_buffers(stage.trunk, stage.hub_config)
    for name, buffer in stage.named_buffers():
        if buffer.is_meta:
            raise ModelError(f"{stage.family.model_type}: table {name!r} is in no file and no rule computes it")
    stage.to(device)


@dataclass(frozen=True)
class StageRow:
    """One line of the stage table; a tied head counts once, in the first stage.

    Attributes:
        end_layer: Layer behind its last one.
        parameters: Numbers that the stage holds.
        trainable: Numbers that the optimizer updates.
        size_bytes: Size of the parameters: of quantised matrices as they are kept, of all others in float32.
        kept: Numbers of the tensors that hold them: two of nf4 are one, and scales count.
    """

    stage: int
    first_layer: int
    end_layer: int
    parameters: int
    trainable: int
    size_bytes: int
    kept: int


def stage_table(hub_config: Any, specs: tuple[StageSpec, ...], adapter: AdapterConfig | None) -> list[StageRow]:
    """Count the parameters of each stage without allocating any of them."""
    rows = []
    for spec in specs:
        stage = meta_stage(hub_config, spec, adapter)
        shared = stage.ties_head and not spec.has_embedding
        tensors = [
            value for name, value in stage.all_parameters().items() if not (shared and name == stage.family.head_weight)
        ]
        packed = quantized_layers(stage).values()
        narrow = sum(layer.weight.numel() + layer.absmax.numel() for layer in packed)
        parameters = (
            sum(value.numel() for value in tensors) + sum(layer.inputs * layer.outputs for layer in packed) - narrow
        )
        trainable = sum(value.numel() for value in tensors if value.requires_grad)
        size = sum(value.numel() * (4 if value.is_floating_point() else 1) for value in tensors)
        num_values = sum(value.numel() for value in tensors)
        rows.append(StageRow(spec.index, spec.first_layer, spec.end_layer, parameters, trainable, size, num_values))
    return rows


def estimate_costs(hub_config: Any) -> tuple[float, float]:
    """Return the work of the embedding and of the head, in units of one block.

    Counts multiplications of weight matrices per token; attention scores, which depend on the
    length of the sequence, are left out, and a table look-up costs one row.
    """
    stage = meta_stage(hub_config, _whole_spec(hub_config), None)
    block = _matrix_work(stage.own_blocks[0])
    trunk = stage.trunk
    head = sum(map(_matrix_work, stage.stage_heads().values()))
    head += sum(_matrix_work(attrgetter(part)(trunk)) for part in stage.family.last_parts)
    first = 0
    for part in stage.family.first_parts:
        first += _look_up_work(attrgetter(part)(trunk))
    return first / block, head / block


def _look_up_work(module: nn.Module | None) -> int:
    """As `_matrix_work`, but for tables, of which a token takes a row."""
    if module is None:
        return 0
    tables = [table for table in module.modules() if isinstance(table, nn.Embedding)]
    return _matrix_work(module) + sum(table.embedding_dim - table.weight.numel() for table in tables)


def _matrix_work(module: nn.Module | None) -> int:
    if module is None:
        return 0
    return sum(value.numel() for value in module.parameters() if value.dim() == 2)
