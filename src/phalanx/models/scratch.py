"""Random weights, drawn by transformers' own rules for the whole model before any stage is cut."""

import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any

import torch

from phalanx.config import canonical_json
from phalanx.errors import ModelError
from phalanx.models.cache import save_hub_layout, written_once
from phalanx.models.families import TRANSFORMERS_REFUSALS, family_of, hub_config_dict
from phalanx.models.hub_files import copy_tokenizer, tokenizer_companions
from phalanx.models.quiet import quiet_transformers


def write_random_model(hub_config: Any, seed: int, cache_dir: Path, tokenizer: Path | None) -> Path:
    """Draw a model and write it to the cache in the hub's layout, unless it is there already.

    The directory is named after config, seed, tokenizer and the versions of torch and transformers, so equal
    names mean equal bytes.

    Args:
        seed: Seed of torch's generator, which is left as it was found.
        tokenizer: A tokenizer.json to put beside the weights with its companions, if it exists.

    Raises:
        ModelError: transformers cannot build the config, or the cache cannot be written.
    """
    has_tokenizer = tokenizer is not None and tokenizer.is_file()
    key: dict[str, Any] = {
        "config": hub_config_dict(hub_config),
        "seed": seed,
        "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer and has_tokenizer else None,
        "versions": [importlib.metadata.version(name) for name in ("torch", "transformers")],
    }
    companions = list(tokenizer_companions(tokenizer.parent)) if tokenizer and has_tokenizer else []
    if companions:
        key["companions"] = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in companions}
    name = f"scratch-{hub_config.model_type}-{hashlib.sha256(canonical_json(key)).hexdigest()[:32]}"

    def write(directory: Path) -> None:
        model = _draw_model(hub_config, seed)
        save_hub_layout(model, hub_config_dict(model.config), directory)
        if tokenizer and has_tokenizer:
            copy_tokenizer(tokenizer, directory)

    return written_once(cache_dir / name, write)


def _draw_model(hub_config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), quiet_transformers():
        torch.manual_seed(seed)
        try:
            return family_of(hub_config.model_type, "model config").whole_model(hub_config)
        except TRANSFORMERS_REFUSALS as exc:
            raise ModelError(f"model config: {hub_config.model_type} cannot be built from it: {exc}") from exc
