"""An adapter in peft's format added to a model directory, and taken out again, exactly.

What rounding makes of a sum cannot be computed back: the merged directory keeps the matrices that were changed.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.checkpoint.export import write_companions, write_weights
from phalanx.checkpoint.export_adapter import add_updates, read_weights
from phalanx.errors import CheckpointError, ModelError
from phalanx.models import ModelSource, parameter_names, parameter_shapes, weights_digest
from phalanx.models.adapters.peft_files import read_adapter_keys, read_tensors
from phalanx.models.adapters.updates import LowRankUpdate, updates_of
from phalanx.models.directory import publish_model, refuse_existing, spare_directory
from phalanx.models.family import SCORE_WEIGHT

KEPT = "phalanx_merge"
"""Directory inside a merged model with the files that undo the merge."""

_BASE = ".base_layer.weight"
_RECORD, _MATRICES = "record.json", "base.safetensors"


def merge_adapter(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Write a model with an adapter merged into its weights, and beside them the data that restores the base.

    Returns:
        Digests of the three, and ``rounding``: how far a weight would be off after subtracting again, at most.
    """
    source = ModelSource(base)
    trained, updates = _read_updates(adapter, source)
    before = read_weights(source)
    after = {name: values.clone() if name in updates else values for name, values in before.items()}
    add_updates(after, updates, source)
    if SCORE_WEIGHT in trained:
        after[SCORE_WEIGHT] = trained[SCORE_WEIGHT]
    changed = {name: values for name, values in before.items() if not torch.equal(values, after[name])}
    record = {
        "base": weights_digest(before.items()),
        "adapter": weights_digest(trained.items()),
        "merged": weights_digest(after.items()),
        "rounding": _rounding_error(before, after, updates, source),
    }

    refuse_existing(out)
    with spare_directory(out) as spare:
        write_weights(spare, after, source)
        write_companions(spare, source, None)
        _copy_companions(base, spare)
        (spare / KEPT).mkdir()
        save_file(changed, spare / KEPT / _MATRICES)
        (spare / KEPT / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        publish_model(spare, out)
    return {**record, "matrices": len(changed)}


def unmerge_adapter(directory: Path, out: Path) -> dict[str, Any]:
    """Write the model that an adapter was merged into, bit for bit."""
    source, (record, stored) = ModelSource(directory), _read_kept(directory)
    now = {name: source.read_tensor(name) for name in parameter_names(source.hub_config)}
    _expect_digest(directory, "the merged weights", weights_digest(now.items()), record["merged"])
    back = {**now, **stored}
    _expect_digest(directory / KEPT, "the weights before the merge", weights_digest(back.items()), record["base"])

    refuse_existing(out)
    with spare_directory(out) as spare:
        write_weights(spare, back, source)
        write_companions(spare, source, None)
        _copy_companions(directory, spare)
        publish_model(spare, out)
    return {"base": record["base"], "matrices": len(stored)}


def _read_updates(adapter: Path, source: ModelSource) -> tuple[dict[str, Tensor], dict[str, LowRankUpdate]]:
    keys = read_adapter_keys(adapter, to_merge=True)
    if keys["peft_type"] != "LORA":
        raise CheckpointError(f"{adapter}: {keys['peft_type']}: virtual tokens are not weights of the model; load both")
    tensors = read_tensors(adapter)
    for name in [name for name in tensors if name.endswith(_BASE)]:
        # of a head or an embedding peft saves the model's own weight beside the adapter
        weight = f"{name.removesuffix(_BASE)}.weight"
        if not torch.equal(tensors.pop(name), source.read_tensor(weight)):
            raise ModelError(f"{adapter}: has its own {weight}, which differs from that of {source.directory}")
    turned = source.family.fan_in_fan_out
    return tensors, updates_of(tensors, keys, parameter_shapes(source.hub_config), adapter, is_turned=turned)


def _rounding_error(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    updates: Mapping[str, LowRankUpdate],
    source: ModelSource,
) -> float | None:
    """Return the error of unmerging without the stored data; None for DoRA, whose magnitudes are lost for good."""
    if any(update.sizes is not None for update in updates.values()):
        return None
    back = {name: after[name].clone() for name in updates}
    add_updates(back, {name: replace(update, scale=-update.scale) for name, update in updates.items()}, source)
    return max((float((values - before[name]).abs().max()) for name, values in back.items()), default=0.0)


def _read_kept(directory: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    home = directory / KEPT
    try:
        record = json.loads((home / _RECORD).read_text(encoding="utf-8"))
        matrices = load_file(home / _MATRICES)
        return {"base": record["base"], "merged": record["merged"]}, matrices
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as exc:
        raise CheckpointError(
            f"{home}: cannot restore the base ({exc}); expected the matrices that `phalanx model merge` saves: "
            "subtracting an adapter leaves the rounding of the sum in the weights; use the base model itself"
        ).with_facts(code="PHX-I059", file=str(home), do="use the base model itself") from exc


def _expect_digest(where: Path, what: str, found: str, expected: object) -> None:
    if found != expected:
        raise CheckpointError(
            f"{where}: {what}: found digest {found:.16}, expected {expected!s:.16}; they were changed since the "
            "merge; use the base model itself"
        ).with_facts(
            code="PHX-I059", file=str(where), found=found, expected=str(expected), do="use the base model itself"
        )


def _copy_companions(directory: Path, target: Path) -> None:
    """Copy tokenizer files and all other files that are no weights."""
    for path in directory.iterdir():
        is_wanted = path.suffix in (".json", ".jinja", ".txt", ".model") and not path.name.endswith(".index.json")
        if is_wanted and path.is_file() and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
