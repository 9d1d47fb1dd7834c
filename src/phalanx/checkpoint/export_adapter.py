"""Trained adapters in peft's format, and added to the model's own weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ModelError
from phalanx.models import (
    AdapterConfig,
    LoraConfig,
    ModelSource,
    PrefixConfig,
    PromptEncoderConfig,
    SpfConfig,
    add_spf,
    encoded_prompt,
    parameter_names,
    parameter_shapes,
)
from phalanx.models.adapters.updates import LowRankUpdate, updates_of
from phalanx.models.classifier import HEAD_TENSORS, ClassifierForm
from phalanx.models.family import SCORE, SCORE_WEIGHT

_SPF = ".spf_delta"


def peft_files(
    trained: Mapping[str, Tensor],
    source: ModelSource,
    adapter: AdapterConfig,
    classifier: ClassifierForm | None = None,
    *,
    is_part: bool = False,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what ``adapter_config.json`` and ``adapter_model.safetensors`` hold.

    Args:
        is_part: Only some blocks have an adapter, as those behind the cut of a split.
    """
    if isinstance(adapter, SpfConfig):
        raise CheckpointError("model.adapter: peft does not support spf; use --merge for a whole model")
    if classifier is not None and not isinstance(adapter, LoraConfig):
        raise CheckpointError("model.adapter: only LoRA is exported with the head of a classifier")
    task = "CAUSAL_LM" if classifier is None else "TOKEN_CLS"
    config: dict[str, Any] = {
        "task_type": "SEQ_CLS" if source.head_kind == "score" else task,
        # a name, for where the model lies is private
        "base_model_name_or_path": source.directory.resolve().name,
        "inference_mode": True,
    }
    if isinstance(adapter, PrefixConfig):
        return config | _prefix_config(source, adapter), {"prompt_embeddings": _prompt_tensor(trained, source)}
    if isinstance(adapter, PromptEncoderConfig):
        return config | _prompt_config(source, adapter), {"prompt_embeddings": encoded_prompt(trained, adapter)}
    config |= {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": list(adapter.targets or source.family.facts.adapter_targets),
        "fan_in_fan_out": source.family.fan_in_fan_out,
        "bias": "none",
        "use_dora": adapter.dora,
        "use_rslora": adapter.rslora,
    }
    if is_part:
        config["layers_to_transform"] = _adapted_layers(trained, source)
    if classifier is not None:
        config["modules_to_save"] = [classifier.head]
        trained = classifier.rename_head(trained)
    elif source.head_kind != "lm":
        config["modules_to_save"] = [SCORE]
    return config, {f"base_model.model.{name}": tensor.contiguous() for name, tensor in trained.items()}


def _adapted_layers(trained: Mapping[str, Tensor], source: ModelSource) -> list[int]:
    """Return the numbers of the blocks that an adapter has matrices for."""
    blocks = f"{source.family.trunk}.{source.family.blocks}."
    return sorted({int(name.removeprefix(blocks).partition(".")[0]) for name in trained if name.startswith(blocks)})


def merge_weights(
    trained: Mapping[str, Tensor],
    source: ModelSource,
    adapter: AdapterConfig,
    *,
    is_part: bool = False,
) -> dict[str, Tensor]:
    """Return the model's own weights with the adapter added; `is_part` as in `peft_files`."""
    if isinstance(adapter, PrefixConfig | PromptEncoderConfig):
        raise CheckpointError("model.adapter: virtual tokens are not weights of the model; remove --merge")
    weights = read_weights(source)
    heads = {name: values for name, values in trained.items() if name in {SCORE_WEIGHT, *HEAD_TENSORS}}
    trained = {name: values for name, values in trained.items() if name not in HEAD_TENSORS}
    if isinstance(adapter, LoraConfig):
        add_updates(weights, lora_updates(trained, source, adapter, is_part=is_part), source)
    else:
        for name in sorted(trained.keys() - heads.keys()):
            layer, values = name.removesuffix(_SPF), trained[name]
            _require_tensor(f"{layer}.weight" in weights, name)
            weights[f"{layer}.weight"] = add_spf(weights[f"{layer}.weight"], layer, values, source.hub_config, adapter)
    return weights | heads


def read_weights(source: ModelSource) -> dict[str, Tensor]:
    """Return the weights that the files hold as float32; a score head that is trained beside an adapter may be new."""
    return {name: source.read_tensor(name) for name in parameter_names(source.hub_config) if source.has_tensor(name)}


def add_updates(weights: Mapping[str, Tensor], updates: Mapping[str, LowRankUpdate], source: ModelSource) -> None:
    """Add a low-rank adapter to weights, in place."""
    for name, update in updates.items():
        update.add_to(weights[name], is_turned=source.family.fan_in_fan_out)


def lora_updates(
    trained: Mapping[str, Tensor], source: ModelSource, adapter: LoraConfig, *, is_part: bool = False
) -> dict[str, LowRankUpdate]:
    """Return what a run's own adapter adds to each weight; `is_part` as in `peft_files`."""
    config, _ = peft_files(trained, source, adapter, is_part=is_part)
    shapes = parameter_shapes(source.hub_config)
    try:
        return updates_of(trained, config, shapes, source.directory, is_turned=source.family.fan_in_fan_out)
    except ModelError as exc:
        raise CheckpointError(f"{exc}") from exc


def _require_tensor(is_there: bool, name: str) -> None:
    if not is_there:
        raise CheckpointError(f"{name}: has no counterpart in checkpoint or model; it belongs to another model")


def _prompt_config(source: ModelSource, adapter: PromptEncoderConfig) -> dict[str, Any]:
    """Return peft's config of a finished prompt encoder: its computed embeddings are loaded."""
    return {
        "peft_type": "P_TUNING",
        "num_virtual_tokens": adapter.tokens,
        "num_layers": source.num_layers,
        "num_attention_heads": int(source.hub_config.num_attention_heads),
        "token_dim": source.hidden_size,
        "num_transformer_submodules": 1,
        "encoder_reparameterization_type": "LSTM" if adapter.encoder == "lstm" else "MLP",
        "encoder_hidden_size": adapter.encoder_size or source.hidden_size,
        "encoder_num_layers": 2,
        "encoder_dropout": 0.0,
    }


def _prefix_config(source: ModelSource, adapter: PrefixConfig) -> dict[str, Any]:
    hub_config = source.hub_config
    heads = int(hub_config.num_attention_heads)
    size = getattr(hub_config, "head_dim", None) or hub_config.hidden_size // heads
    heads = int(getattr(hub_config, "num_key_value_heads", None) or heads)
    return {
        "peft_type": "PREFIX_TUNING",
        "num_virtual_tokens": adapter.tokens,
        "num_layers": source.num_layers,
        "num_attention_heads": heads,
        "token_dim": heads * size,
        "encoder_hidden_size": heads * size,
        "num_transformer_submodules": 1,
        "prefix_projection": False,
    }


def _prompt_tensor(trained: Mapping[str, Tensor], source: ModelSource) -> Tensor:
    """Keys and values of all layers as ``[tokens, layers * 2 * heads * size]``."""
    path = f"{source.family.trunk}.{source.family.blocks}"
    names = [f"{path}.{i}.prefix.{part}" for i in range(source.num_layers) for part in ("key", "value")]
    for name in names:
        _require_tensor(name in trained, name)
    return torch.cat([trained[name].transpose(0, 1).flatten(1) for name in names], dim=1).contiguous()
