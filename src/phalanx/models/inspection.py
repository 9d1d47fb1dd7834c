"""The contents of a hub directory, and the reasons for which a run would refuse it."""

import json
import math
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError
from phalanx.models.build import parameter_shapes
from phalanx.models.directory import TOKENIZER
from phalanx.models.hub_files import tokenizer_companions
from phalanx.models.imported import check_shapes, describe_head
from phalanx.models.source import ModelSource, read_hub_config
from phalanx.models.unpickle import pickled_files


def inspect_model(directory: Path) -> dict[str, Any]:
    """Return figures of a model directory; ``refused`` lists why a run would not take it, empty where it would.

    Headers are read, and no weights.
    """
    description: dict[str, Any] = {"directory": str(directory)}
    refused: list[str] = []
    try:
        hub_config = read_hub_config(directory)
    except PhalanxError as exc:
        return description | {"refused": [str(exc)]}
    shapes = parameter_shapes(hub_config)
    description |= {
        "family": hub_config.model_type,
        "parameters": sum(math.prod(shape) for shape in shapes.values()),
        "layers": hub_config.num_hidden_layers,
        "hidden size": hub_config.hidden_size,
        "heads": hub_config.num_attention_heads,
        "heads of keys": getattr(hub_config, "num_key_value_heads", None) or hub_config.num_attention_heads,
        "vocabulary": hub_config.vocab_size,
        "window": getattr(hub_config, "sliding_window", None),
        "weights": _weights_kind(directory),
        "tokenizer": _tokenizer_kind(directory),
        "chat template": _has_template(directory),
    }
    try:
        source = ModelSource(directory)
        description["head"] = describe_head(source)
        check_shapes(source)
    except PhalanxError as exc:
        hint = "; phalanx model convert makes safetensors of them" if description["weights"] == "pickled" else ""
        refused.append(f"{exc}{hint}")
    if description["tokenizer"] is None:
        refused.append(f'{directory}: no tokenizer; data.tokenizer.kind = "bpe" or "file" is needed')
    elif description["tokenizer"] == "other files":
        refused.append(f"{directory}: no {TOKENIZER}; phalanx model import makes one of the files that are there")
    return description | {"refused": refused}


def _weights_kind(directory: Path) -> str | None:
    if any(directory.glob("*.safetensors")):
        return "safetensors"
    try:
        return "pickled" if pickled_files(directory) else None
    except PhalanxError:
        return "pickled"


def _tokenizer_kind(directory: Path) -> str | None:
    if (directory / TOKENIZER).is_file():
        return TOKENIZER
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        return "vocab.json and merges.txt"
    return "other files" if any(tokenizer_companions(directory)) else None


def _has_template(directory: Path) -> bool:
    names = {path.name for path in tokenizer_companions(directory)}
    if names & {"chat_template.jinja", "chat_template.json"}:
        return True
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))
