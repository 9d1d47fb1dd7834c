"""A directory in peft's format: what its config says, and its tensors by their canonical names."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from phalanx.errors import ModelError
from phalanx.models.adapters.prompt import PROMPT_TABLE
from phalanx.models.config import LoraConfig, PrefixConfig, PromptEncoderConfig, SlicedAdapter
from phalanx.models.family import SCORE_WEIGHT, Family

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAMES_BEGIN = "base_model.model."
"""How the name of every tensor of low-rank adapters begins in peft's files."""

_PROMPT = "prompt_embeddings"
_KINDS_OF_PROMPTS = ("P_TUNING", "PROMPT_TUNING")
_SILENT = {None, False, "", "none"}
_USUAL: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": (True, "gaussian"),
}
_TOLD = {
    *(
        "task_type",
        "base_model_name_or_path",
        "inference_mode",
        "peft_type",
        "peft_version",
        "revision",
        "auto_mapping",
    ),
    *("r", "lora_alpha", "lora_dropout", "target_modules", "fan_in_fan_out", "use_dora", "use_rslora"),
    *("num_virtual_tokens", "num_layers", "num_attention_heads", "token_dim", "encoder_hidden_size"),
    *("encoder_reparameterization_type", "encoder_num_layers", "encoder_dropout"),
    *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"),
    *("num_transformer_submodules", "megatron_core", "runtime_config", "qalora_group_size", "modules_to_save"),
}
"""Keys that are read, or that change nothing of what a loaded adapter computes."""
_MERGED = frozenset(
    {
        *("target_modules", "target_parameters", "layers_to_transform", "layers_pattern", "exclude_modules"),
        *("rank_pattern", "alpha_pattern", "init_lora_weights"),
    }
)
"""Keys that say on which layers an adapter is, and how strong it is there."""
_IN_BLOCK = re.compile(r"(.*?\.)(\d+)\.(.+)", re.ASCII)
"""The full name of a layer: the prefix before the number of its block, the number, and its name in the block."""


def read_adapter_config(directory: Path) -> SlicedAdapter:
    """Read the adapter config of a directory."""
    path, keys = directory / CONFIG, read_adapter_keys(directory)
    try:
        if keys["peft_type"] == "PREFIX_TUNING":
            return PrefixConfig(kind="ptuning", tokens=keys["num_virtual_tokens"])
        if keys["peft_type"] in _KINDS_OF_PROMPTS:
            return PromptEncoderConfig(kind="prompt_encoder", tokens=keys["num_virtual_tokens"], encoder="none")
        return LoraConfig(
            rank=keys["r"],
            alpha=keys["lora_alpha"],
            dropout=keys.get("lora_dropout", 0.0),
            targets=_targets_of_blocks(keys["target_modules"] or (), path),
            dora=bool(keys.get("use_dora")),
            rslora=bool(keys.get("use_rslora")),
        )
    except (KeyError, ValidationError, TypeError) as exc:
        raise ModelError(f"{path}: is malformed: {exc}") from exc


def read_adapter_keys(directory: Path, *, to_merge: bool = False) -> dict[str, Any]:
    """Read a directory's adapter_config.json.

    Args:
        to_merge: Layers, ranks and scales may differ in ways that weights can take and stages cannot.
    """
    path = directory / CONFIG
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read ({exc.strerror}); give a directory in peft's format") from exc
    except ValueError as exc:
        raise ModelError(f"{path}: is no JSON ({exc})") from exc
    if not isinstance(keys, dict):
        raise ModelError(f"{path}: found {type(keys).__name__}; expected an object")
    _refuse_foreign(keys, path, _MERGED if to_merge else frozenset())
    return keys


def _targets_of_blocks(targets: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return targets as every block has them: of a small model peft writes the full name of each layer instead."""
    ends: set[str] = set()
    blocks: dict[str, set[str]] = {}
    for target in targets:
        full = _IN_BLOCK.match(target)
        if full is None:
            ends.add(target)
        else:
            blocks.setdefault(full[3], set()).add(f"{full[1]}{full[2]}")
    everywhere = set().union(*blocks.values())
    differing = sorted(end for end, those in blocks.items() if those != everywhere)
    if differing:
        raise ModelError(
            f"{path}: target_modules: found {differing[0]} in some blocks alone, which stages cannot carry; merge the "
            "adapter into its model (phalanx model merge)"
        )
    return tuple(sorted(ends | set(blocks)))


def read_adapter(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the adapter's tensors as float32, by their canonical names.

    Args:
        shapes: Shapes of all trained tensors of the whole model, in the model's order.
    """
    path, tensors = directory / WEIGHTS, read_tensors(directory)
    if _PROMPT in tensors:
        table = tensors[_PROMPT]
        prefixes = {} if PROMPT_TABLE in shapes else _split_prefixes(table, shapes, path)
        tensors = {name: values.contiguous() for name, values in prefixes.items()} or {PROMPT_TABLE: table}
    # a score head may be new
    expected_shapes = {name: shape for name, shape in shapes.items() if name != SCORE_WEIGHT or name in tensors}
    differing = [
        name
        for name in {*tensors, *expected_shapes}
        if name not in tensors or expected_shapes.get(name) != tensors[name].shape
    ]
    if differing:
        name = min(differing)
        have = list(tensors[name].shape) if name in tensors else "nothing"
        need = list(expected_shapes[name]) if name in expected_shapes else "nothing"
        raise ModelError(f"{path}: {name}: found {have}, expected {need}; it is the adapter of another model")
    return tensors


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of an adapter as float32, by their canonical names."""
    path = directory / WEIGHTS
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"{path}: cannot be read as safetensors: {exc}") from exc
    for name, values in stored.items():
        if not values.is_floating_point() or not bool(torch.isfinite(values).all()):
            raise ModelError(f"{path}: tensor {name!r} holds what is no finite number in floating point; take another")
    return {name.removeprefix(NAMES_BEGIN): values.to(torch.float32).contiguous() for name, values in stored.items()}


def first_values(adapter: SlicedAdapter, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return the values that training begins with, of the directory that a run file names.

    Raises:
        ModelError: The directory holds another adapter than the run file describes, or one of another model.
    """
    directory = Path(adapter.path or "")
    _compare_adapters(adapter, read_adapter_config(directory), family, directory)
    return read_adapter(directory, shapes)


def _compare_adapters(adapter: SlicedAdapter, saved: SlicedAdapter, family: Family, where: Path) -> None:
    def facts(one: SlicedAdapter) -> dict[str, Any]:
        if not isinstance(one, LoraConfig):
            return {"kind": one.kind, "tokens": one.tokens}
        targets = sorted(one.targets or family.facts.adapter_targets)
        return {name: getattr(one, name) for name in ("kind", "rank", "alpha", "dora", "rslora")} | {"targets": targets}

    mine, theirs = facts(adapter), facts(saved)
    for key in {**mine, **theirs}:
        if mine.get(key) != theirs.get(key):
            raise ModelError(
                f"model.adapter.{key}: found {mine.get(key)}; {where} has {theirs.get(key)}; write what it has"
            )


def _refuse_foreign(keys: Mapping[str, Any], path: Path, taken: frozenset[str]) -> None:
    kind = keys.get("peft_type")
    if kind not in ("LORA", "PREFIX_TUNING", *_KINDS_OF_PROMPTS):
        raise ModelError(
            f"{path}: peft_type: found {kind!r}; stages can carry LORA (DoRA, rsLoRA), PREFIX_TUNING, which is "
            "P-tuning v2, P_TUNING and PROMPT_TUNING"
        )
    if isinstance(keys.get("target_modules"), str) and "target_modules" not in taken:
        raise ModelError(f"{path}: target_modules: is a pattern; list the names of the layers")
    if keys.get("modules_to_save") not in (None, [], ["score"]):
        raise ModelError(f"{path}: modules_to_save: found {keys['modules_to_save']}; stages train an adapter alone")
    for key, value in keys.items():
        is_empty = isinstance(value, dict | list) and not value
        if (
            key in _TOLD
            or key in taken
            or is_empty
            or value in _USUAL.get(key, ())
            or ((not isinstance(value, dict | list)) and value in _SILENT)
        ):
            continue
        raise ModelError(
            f"{path}: {key}: found {json.dumps(value)}, which stages cannot carry; take an adapter without"
        )


def _split_prefixes(values: Tensor, shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, Tensor]:
    """Cut ``[tokens, layers * 2 * heads * size]`` into keys and values of each layer, ``[heads, tokens, size]``."""
    names = [name for name in shapes if name != SCORE_WEIGHT]
    heads, tokens, size = shapes[names[0]]
    if values.shape != (tokens, len(names) * heads * size):
        raise ModelError(
            f"{path}: {_PROMPT}: found {list(values.shape)}, expected {[tokens, len(names) * heads * size]}; it is the "
            "adapter of another model"
        )
    parts = values.chunk(len(names), dim=1)
    return {name: part.reshape(tokens, heads, size).transpose(0, 1) for name, part in zip(names, parts, strict=True)}
