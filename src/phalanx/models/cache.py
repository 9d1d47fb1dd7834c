"""Model directories that are written once and never seen half-written."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from phalanx.errors import ModelError


def written_once(target: Path, write: Callable[[Path], None]) -> Path:
    """Return `target`, letting `write` fill it first if it is not there.

    The files are written to a directory beside it, which then takes its name in one step: a crash leaves no
    half of a model, and of two writers the second one's work is thrown away.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as exc:
        raise ModelError(f"{target.parent}: cannot be written ({exc.strerror}); choose another cache") from exc
    try:
        write(scratch)
        os.rename(scratch, target)
    except OSError as exc:
        if not target.is_dir():
            raise ModelError(f"{target}: cannot be written ({exc.strerror})") from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def save_hub_layout(model: Any, config: Mapping[str, Any], directory: Path) -> None:
    """Write config.json (see `hub_config_dict`) and model.safetensors; a tied head is left to its embedding."""
    tensors = {
        name: value.detach().contiguous()
        for name, value in model.named_parameters()  # tied parameters come once, under the first name
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True), encoding="utf-8")
