"""Relative paths of a run file begin where phalanx was started; an error says when they lie beside the file instead."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError

_PATH_KEYS = frozenset({"path", "home", "train", "test", "prompts", "template", "pki", "linked_roots"})
"""Keys of run files and recipes that name a file or a folder which is read."""


def check_relative_paths(data: Any, file: Path) -> None:
    """Refuse a relative path that leads nowhere from the working directory and to a file from the run file's own.

    Args:
        data: What the file says, as plain data.

    Raises:
        ConfigError: Names the key, where it was looked for, and what to write.
    """
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
