"""A model's shape from the hub's config.json alone."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.errors import ModelError
from phalanx.planner.model.config_keys import ConfigKeys
from phalanx.planner.model.families import FAMILIES
from phalanx.planner.model.shape import ModelShape, head_kind, with_head


def read_shape(path: Path) -> ModelShape:
    """Read the shape of a model.

    Args:
        path: A config.json in the hub's form, or the directory that holds one.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read ({exc.strerror}); give a model's config.json") from exc
    except (ValueError, RecursionError) as exc:
        raise ModelError(f"{path}: is not valid JSON: {exc}") from exc
    if not isinstance(data, dict):
        raise ModelError(f"{path}: found a {type(data).__name__}; expected an object")
    return shape_of(data, str(path))


def shape_of(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Return the shape that a hub config describes.

    Args:
        config: The keys of a config.json, ``model_type`` included.
        where: File or section for the messages.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(f"{where}: model_type: found {family!r}; expected one of {', '.join(sorted(FAMILIES))}")
    keys, facts = ConfigKeys(config, where), FAMILIES[family]
    shape = with_head(facts.shape(keys), head_kind(config))
    windows = facts.slicing is not None and facts.slicing.may_have_windows(keys)
    return replace(shape, family=family, attention_dropout=keys.read_share(*facts.dropout), windows=windows)
