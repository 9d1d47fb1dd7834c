"""TOML file and ``key=value`` overrides to a frozen config; every mistake becomes one ConfigError."""

import difflib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from phalanx.config.strict import RefusedKeyError
from phalanx.errors import ConfigError

_PATH_KEYS = frozenset({"path", "home", "train", "test", "prompts", "template", "pki", "linked_roots"})
"""Keys of run files and recipes that name a file or a folder which is read."""


def check_relative_paths(data: Any, file: Path) -> None:
    """Refuse a relative path that leads nowhere from the working directory and to a file from the run file's own."""
    home = file.parent
    for key, value in _find_paths(data):
        path = Path(value)
        if path.is_absolute() or "://" in value or path.exists() or not (home / path).exists():
            continue
        instead = os.path.relpath(home / path)
        raise ConfigError(
            f"{file}: {key}: {value} is looked for in {Path.cwd()}, where phalanx was started, and is not there; "
            f"it lies beside the run file: write {instead}, or start phalanx in {home}"
        ).with_facts(
            code="PHX-C001",
            file=str(file),
            key=key,
            found=value,
            expected=f"a path that begins in {Path.cwd()}",
            do=f"write {instead}, or start phalanx in {home}",
        )


def _find_paths(data: Any, name: str = "", key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(data, dict):
        for inner, value in data.items():
            yield from _find_paths(value, f"{name}.{inner}".removeprefix("."), inner)
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _find_paths(value, f"{name}.{index}", key)
    elif isinstance(data, str) and data and key in _PATH_KEYS and (key != "template" or data.endswith(".jinja")):
        yield name, str(data)


Config = TypeVar("Config", bound=BaseModel)
LONGEST_VALUE = 80


@dataclass(frozen=True)
class Variants(Generic[Config]):
    """Configs that one kind of file may hold.

    Attributes:
        choose: Picks one of `members` by the sections of a file; raises `RefusedKeyError` where none has them.
    """

    members: tuple[type[Config], ...]
    choose: Callable[[Mapping[str, Any]], type[Config]]


def load_config(
    path: Path,
    model: type[Config] | Variants[Config],
    overrides: Iterable[str] = (),
    prepare: Callable[[dict[str, Any], Path], None] | None = None,
) -> Config:
    """Read one TOML file, apply overrides and validate.

    Args:
        overrides: ``section.key=value`` strings, with values in TOML or plain text, and ``section.key-``, which takes
            a key or a section out; in this order.
        prepare: Changes the parsed values, given the directory of the file, before validation.

    Raises:
        ConfigError: Names the file, the key, the value found and the expected one.
    """
    try:
        # editors of Windows write a byte-order mark
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read ({exc.strerror}); give the path of a TOML file").with_facts(
            code="PHX-C003",
            file=str(path),
            found=exc.strerror or "",
            expected="a TOML file",
            do="give the path of a TOML file",
        ) from exc
    except (ValueError, RecursionError) as exc:
        # ValueError: bad syntax, bad UTF-8, and an integer of thousands of digits
        do = "correct that line: key = value, text in quotes"
        raise ConfigError(f"{path}: is not valid TOML: {exc}; {do}").with_facts(
            code="PHX-C004", file=str(path), found=str(exc), expected="TOML", do=do
        ) from exc
    return config_of(data, path, model, overrides, prepare)


def config_of(
    data: dict[str, Any],
    path: Path,
    model: type[Config] | Variants[Config],
    overrides: Iterable[str] = (),
    prepare: Callable[[dict[str, Any], Path], None] | None = None,
) -> Config:
    """Make a config from values of a file or a command line; `load_config` reads the file.

    Args:
        data: Sections and keys; overrides are written into it.
        path: Source of the values, for messages and for `prepare`.
    """
    for override in overrides:
        if override.endswith("-") and "=" not in override:
            _remove_key(data, override.removesuffix("-"), path)
        else:
            keys, value = parse_override(override)
            _assign_override(data, keys, value, override)
    for name, value in _find_dates(data):
        raise ConfigError(f'{path}: {name}: found the date or time {value}; write it as text: "{value}"').with_facts(
            code="PHX-C007", file=str(path), key=name, found=str(value), expected="text"
        )
    if prepare is not None:
        try:
            prepare(data, path.parent)
        except ConfigError as exc:
            raise ConfigError(f"{path}: {exc}").with_facts(**{**exc.error_facts, "file": str(path)}) from exc
    choices: tuple[type[BaseModel], ...] = (model,) if isinstance(model, type) else model.members
    try:
        chosen = model if isinstance(model, type) else model.choose(data)
        # JSON mode: strict types, but a TOML array may become a tuple
        return chosen.model_validate_json(json.dumps(data))
    except RefusedKeyError as exc:
        raise ConfigError(f"{path}: (whole file): {exc}").with_facts(file=str(path), **exc.facts) from exc
    except ValidationError as exc:
        explanations = [_explain_error(error, choices) for error in exc.errors()]
        message = "\n".join(f"{path}: {facts['key']}: {explanation}" for explanation, facts in explanations)
        first = exc.errors()[0].get("ctx", {}).get("error")
        facts = explanations[0][1] | (first.facts if isinstance(first, RefusedKeyError) else {})
        raise ConfigError(message).with_facts(file=str(path), **facts) from exc


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``a.b=c`` into its keys and its value; the value is TOML, or else plain text."""
    name, separator, raw = text.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not separator or not all(keys):
        raise ConfigError(f"--set {text!r}: expected section.key=value, for example train.steps=100").with_facts(
            code="PHX-C008", key="--set", found=text, expected="section.key=value", do="write section.key=value"
        )
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return keys, raw.strip()
    # a line break in the value would smuggle in further keys, which would not be seen
    return keys, parsed["value"] if len(parsed) == 1 else raw.strip()


def dump_toml(config: BaseModel) -> str:
    """Write a config as TOML; keys without a value are left out."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _assign_override(data: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override!r}: {key!r} is a value, not a section").with_facts(
                code="PHX-C008", key="--set", found=override
            )
    data[keys[-1]] = value


def _remove_key(data: dict[str, Any], name: str, path: Path) -> None:
    *sections, last = (key.strip() for key in name.split("."))
    for key in sections:
        inner = data.get(key)
        data = inner if isinstance(inner, dict) else {}
    if last not in data:
        written = f"; written there: {', '.join(data)}" if data else ""
        raise ConfigError(f"--unset {name}: {path} does not write it{written}; remove the option").with_facts(
            code="PHX-C008",
            file=str(path),
            key=f"--unset {name}",
            found="no such key",
            expected="a key that the file writes",
            do="remove the option",
        )
    del data[last]


def _find_dates(data: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, date | time):
        yield name, data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield from _find_dates(value, f"{name}.{key}".removeprefix("."))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _find_dates(value, f"{name}.{index}")


def _explain_error(error: ErrorDetails, models: Iterable[type[BaseModel]]) -> tuple[str, dict[str, str]]:
    """Return an error in words, and as facts for programs."""
    facts = {"key": ".".join(str(part) for part in error["loc"]) or "(whole file)"}
    if error["type"] == "extra_forbidden":
        choices = _key_choices(models, error["loc"][:-1])
        close = difflib.get_close_matches(str(error["loc"][-1]), choices, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        facts |= {"code": "PHX-C005", "found": str(error["loc"][-1]), "expected": ", ".join(choices)}
        return f"unknown key; {hint}choices: {', '.join(choices)}", facts | (
            {"do": f"did you mean {close[0]!r}?"} if close else {}
        )
    if error["type"] in {"missing", "union_tag_not_found"}:
        facts |= {"code": "PHX-C006", "found": "nothing", "expected": "a value", "do": "add it"}
    if error["type"] == "missing":
        return "missing; add it", facts
    if error["type"] == "union_tag_not_found":
        return "missing; add it", facts | {"key": f"{facts['key']}.kind"}
    if error["type"] == "union_tag_invalid":
        tag, expected_tags = repr(error["ctx"]["tag"]), str(error["ctx"]["expected_tags"])
        facts |= {
            "code": "PHX-C007",
            "key": f"{facts['key']}.kind",
            "found": tag,
            "expected": f"one of {expected_tags}",
        }
        return f"found {tag}; expected one of {expected_tags}", facts
    if error["type"] == "value_error":
        return str(error["ctx"]["error"]), facts
    value = repr(error["input"])
    if len(value) > LONGEST_VALUE:
        value = f"{value[:LONGEST_VALUE]}..."
    expected = error["msg"].removeprefix("Input ")
    facts |= {"code": "PHX-C007", "found": value, "expected": expected, "do": f"change {facts['key']}: {expected}"}
    return f"found {value}; {expected}", facts


def _key_choices(models: Iterable[type[BaseModel]], path: tuple[int | str, ...]) -> list[str]:
    current = list(models)
    for part in path:
        fields = [model.model_fields[str(part)] for model in current if str(part) in model.model_fields]
        if fields:
            current = [inner for field in fields for inner in _models_in(field.annotation)]
        else:
            # an index, a key of a mapping, or the tag that picked one member of a union
            current = [model for model in current if _has_tag(model, part)] or current
    return sorted({name for model in current for name in model.model_fields})


def _has_tag(model: type[BaseModel], tag: int | str) -> bool:
    return model.__name__ == tag or any(tag in get_args(field.annotation) for field in model.model_fields.values())


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
