"""An error for people, as one message, and for programs, as one JSON object."""

from typing import Any

import typer

from phalanx.cli.explain import error_pages
from phalanx.errors import FACTS, PhalanxError

USAGE = "PHX-C002"
INTERRUPTED = "PHX-A130"
BUG = "PHX-A002"

# the base of all that is wrong with a command line; typer has it under a private name
UsageRefusal: type[Any] = typer.BadParameter.__mro__[2]


def error_object(exc: PhalanxError) -> dict[str, Any]:
    """Return an error as programs get it; a fact that is not known is null, and a cure that is not is its page's."""
    facts = exc.error_facts
    return _error_fields(str(exc), exc.exit_code, type(exc).__name__, facts)


def usage_object(exc: Any) -> dict[str, Any]:
    """Describe the fault of a command line."""
    key = next(iter(getattr(getattr(exc, "param", None), "opts", None) or ()), "COMMAND")
    facts = {"code": USAGE, "key": key}
    return _error_fields(exc.format_message(), exc.exit_code, "UsageError", facts)


def plain_object(message: str, exit_code: int, code: str) -> dict[str, Any]:
    """Return an end that is no error of the tree."""
    return _error_fields(message, exit_code, None, {"code": code})


def _error_fields(message: str, exit_code: int, kind: str | None, facts: dict[str, str]) -> dict[str, Any]:
    known_facts = {name: facts.get(name) for name in FACTS}
    if known_facts["do"] is None and facts["code"] in error_pages():
        known_facts["do"] = error_pages()[facts["code"]].cure
    return {
        "error": {
            "code": known_facts.pop("code"),
            "kind": kind,
            "exit_code": exit_code,
            "message": message,
            **known_facts,
        }
    }
