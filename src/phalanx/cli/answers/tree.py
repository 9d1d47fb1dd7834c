"""What every command of the tree offers: ``--json``, its exit codes, and help that keeps words in square brackets."""

import functools
import inspect
import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from phalanx.cli.answers.answer import OPTION, Answer

EXIT_CODES = (
    "Exit codes: 0 success, 1 a bug in Phalanx, 2 wrong command line or run file, 3 wrong or missing files, 4 "
    "a peer or a link failed, 5 a claim, log or proof is invalid, 6 training cannot go on, 7 not decidable, "
    "130 interrupted."
)
_TAG = re.compile(r"(?=\[[a-zA-Z#/@])")
"""Before what rich takes for the beginning of a tag."""


def leaf_commands(command: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each command that does something, with the words that call it."""
    below = getattr(command, "commands", None)
    if below is None:
        yield names, command
    for name, subcommand in (below or {}).items():
        yield from leaf_commands(subcommand, (*names, name))


def returns_answer(command: Any) -> bool:
    """Whether a command returns an `Answer`, and so can be asked for JSON."""
    return inspect.signature(command.callback).return_annotation is Answer


def add_json_options(root: Any) -> None:
    """Give each command of a tree ``--json`` and a paragraph with its exit codes, once."""
    for _, command in leaf_commands(root):
        if returns_answer(command):
            command.params.append(_json_option())
        if "Exit codes:" not in (command.epilog or ""):
            command.epilog = f"{command.epilog or ''}\n\n{EXIT_CODES}".strip()
    _keep_brackets(root)


@functools.cache
def _json_option() -> Any:
    """Return the option that all commands share; a parameter of typer has no public constructor."""
    holder = typer.Typer(add_completion=False)
    holder.command()(_hold_json_option)
    return typer.main.get_command(holder).params[0]


def _hold_json_option(
    json: Annotated[
        bool,
        typer.Option(
            OPTION, expose_value=False, help="Print JSON to stdout, also for errors; all other output goes to stderr."
        ),
    ] = False,
) -> None:
    """Hold the option."""


def _keep_brackets(part: Any) -> None:
    for name in ("help", "short_help", "epilog"):
        if getattr(part, name, None):
            setattr(part, name, _TAG.sub(r"\\", getattr(part, name)))
    for below in (*getattr(part, "params", ()), *getattr(part, "commands", {}).values()):
        _keep_brackets(below)
