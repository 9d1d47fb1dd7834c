"""A checkpoint as a directory in the hub's layout, which transformers and peft load."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpoint.export_adapter import merged, peft_files
from phalanx.checkpoint.load import Checkpoint
from phalanx.errors import CheckpointError
from phalanx.models import AdapterConfig, ModelSource, parameter_names

_WEIGHT = "weight/"
_METADATA = {"format": "pt"}


def export_model(
    checkpoint: Checkpoint,
    source: ModelSource,
    out: Path,
    *,
    adapter: AdapterConfig | None,
    merge: bool = False,
    tokenizer: Path | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` and ``tokenizer.json``; for an adapter, what peft writes instead.

    Weights are float32, whole and un-sliced, whatever stages they were trained in. The directory appears in one go.

    Args:
        checkpoint: Verified.
        source: The model that was trained, or that the adapter belongs to.
        out: New directory.
        adapter: What was trained, where not all weights were.
        merge: Add the adapter to the model's own weights and write a whole model.
        tokenizer: Its tokenizer.json.

    Raises:
        CheckpointError: `out` exists, cannot be written, or the checkpoint is not of this model.
        ModelError: A tensor of the model is missing.
    """
    if out.exists():
        raise CheckpointError(f"{out}: exists already and is not overwritten; choose another place")
    trained = {
        name.removeprefix(_WEIGHT): checkpoint.tensor(name) for name in checkpoint.names() if name.startswith(_WEIGHT)
    }
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        spare = Path(tempfile.mkdtemp(prefix=".exporting-", dir=out.parent))
        try:
            if adapter is not None and not merge:
                _write_adapter(spare, trained, source, adapter)
            else:
                weights = trained if adapter is None else merged(trained, source, adapter)
                _write_model(spare, weights, source)
            if tokenizer is not None:
                shutil.copyfile(tokenizer, spare / "tokenizer.json")
            spare.chmod(0o755)
            spare.rename(out)
        finally:
            shutil.rmtree(spare, ignore_errors=True)
    except OSError as exc:
        raise CheckpointError(f"{out}: cannot be written ({exc.strerror})") from exc


def _write_model(target: Path, weights: Mapping[str, Tensor], source: ModelSource) -> None:
    expected = set(parameter_names(source.hub_config))
    if set(weights) != expected:
        differing = sorted(expected ^ set(weights))
        raise CheckpointError(
            f"{target.parent}: {differing[:3]} differ from the model's parameters; give the run's own"
        )
    config = {**source.hub_config_dict, "dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, target / "model.safetensors", _METADATA)


def _write_adapter(target: Path, trained: Mapping[str, Tensor], source: ModelSource, adapter: AdapterConfig) -> None:
    config, named = peft_files(trained, source, adapter)
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(named, target / "adapter_model.safetensors", _METADATA)
