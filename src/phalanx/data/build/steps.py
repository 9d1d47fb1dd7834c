"""The steps that a recipe may name: every rule and every scan; and what decides the outcomes of one."""

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.data.rules import RULES, RuleEntry, RuleSettings
from phalanx.data.scan import SCANS
from phalanx.errors import DataError

STEPS: dict[str, RuleEntry] = {**RULES, **SCANS}


def step_settings(step: RuleSettings) -> dict[str, Any]:
    """Return what decides the outcomes of a step: its keys, and digests of the files that they name."""
    files = {str(path): _file_digest(path) for path in sorted(_collect_paths(step.model_dump()))}
    settings = step.model_dump(mode="json")
    return {**settings, "files read": files} if files else settings


def _collect_paths(value: Any) -> Iterator[Path]:
    if isinstance(value, Path):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _collect_paths(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _collect_paths(item)


def _file_digest(path: Path) -> str:
    try:
        stat = path.stat()
        return _digest_of(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    except OSError as exc:
        raise DataError(f"{path}: a step names it, and it cannot be read ({exc.strerror})") from exc


@cache
def _digest_of(path: Path, _inode: int, _size: int, _changed_ns: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
