"""The config of a run as a dry run shows it: the keys that differ from their defaults."""

from typing import Any

import tomli_w
from rich.console import RenderableType
from rich.syntax import Syntax

from phalanx.train.config import RunConfig

_NOTE = """# every other key has its default: docs/configuration.md;
# the run directory's config.toml has them all
"""


def shown_config(run: RunConfig) -> RenderableType:
    """The keys of a run file that differ from their defaults, and the required ones, as TOML."""
    full = run.model_dump(mode="json", exclude_none=True)
    short = _with_kinds(run.model_dump(mode="json", exclude_none=True, exclude_defaults=True), full)
    written = {name: section for name, section in short.items() if section != {}}
    return Syntax(tomli_w.dumps(written) + _NOTE, "toml", background_color="default", word_wrap=True)


def _with_kinds(short: Any, full: Any) -> Any:
    """Put the kind of each table back: without it the keys beside it say little."""
    if isinstance(short, dict) and isinstance(full, dict):
        kind = {"kind": full["kind"]} if "kind" in full else {}
        return kind | {name: _with_kinds(value, full.get(name)) for name, value in short.items()}
    if isinstance(short, list) and isinstance(full, list) and len(short) == len(full):
        return [_with_kinds(one, other) for one, other in zip(short, full, strict=True)]
    return short
