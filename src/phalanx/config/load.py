"""TOML file and ``key=value`` overrides to a frozen config; every mistake becomes one ConfigError."""

import difflib
import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from phalanx.errors import ConfigError

Config = TypeVar("Config", bound=BaseModel)


def load_config(path: Path, model: type[Config], overrides: Iterable[str] = ()) -> Config:
    """Read one TOML file, apply overrides and validate.

    Args:
        path: The file.
        model: The config class.
        overrides: ``section.key=value`` strings; values are TOML, or plain text.

    Raises:
        ConfigError: Names the file, the key, the value found and what was expected.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror}); give the path of a TOML file") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: is not valid TOML: {exc}") from exc
    for override in overrides:
        keys, value = parse_override(override)
        _assign(data, keys, value, override)
    try:
        # JSON mode: strict types, but a TOML array may become a tuple
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as exc:
        lines = [_explain(error, model) for error in exc.errors()]
        raise ConfigError("\n".join(f"{path}: {line}" for line in lines)) from exc


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``a.b=c`` into its keys and its value; the value is TOML, or else plain text.

    Raises:
        ConfigError: There is no ``=`` or a key is empty.
    """
    name, separator, raw = text.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not separator or not all(keys):
        raise ConfigError(f"--set {text!r}: expected section.key=value, for example train.steps=100")
    try:
        return keys, tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return keys, raw.strip()


def dump_toml(config: BaseModel) -> str:
    """Write a config as TOML; keys without a value are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _assign(data: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override!r}: {key!r} is a value, not a section")
    data[keys[-1]] = value


def _explain(error: ErrorDetails, model: type[BaseModel]) -> str:
    where = ".".join(str(part) for part in error["loc"]) or "(whole file)"
    if error["type"] == "extra_forbidden":
        choices = _choices(model, error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), choices, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"{where}: unknown key{hint} choices: {', '.join(choices)}"
    if error["type"] == "missing":
        return f"{where}: missing; add it"
    if error["type"] == "value_error":
        return f"{where}: {error['ctx']['error']}"
    return f"{where}: found {error['input']!r}; {error['msg'].removeprefix('Input ')}"


def _choices(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in path:
        if isinstance(part, int) or part not in getattr(current, "model_fields", {}):
            continue
        current = _model_in(current.model_fields[part].annotation)
    return sorted(getattr(current, "model_fields", {}))


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
