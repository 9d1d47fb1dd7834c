"""The command line as a function: arguments in, an exit code out."""

import contextlib
import functools
import gc
import io
import sys
from collections.abc import Sequence
from typing import Any

import typer

from phalanx.cli.answers.answer import OPTION, json_alone
from phalanx.cli.answers.ending import exit_code_of
from phalanx.cli.answers.tree import add_json_options
from phalanx.cli.app import app
from phalanx.cli.role_gate import guard_commands


def run_command(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    # asked of the words, not of the parser: a command line that cannot be parsed is refused in JSON as well
    with json_alone() if OPTION in arguments else contextlib.nullcontext():
        # the command, not the app: calling the app installs typer's own traceback printer
        return exit_code_of(lambda: build_command()(args=list(arguments), prog_name="phalanx", standalone_mode=False))


def main() -> None:
    """Run the process's own command line and exit."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # as in arguments: what is no UTF-8 is refused where it is read as text
        sys.stdin.reconfigure(errors="surrogateescape")
    code = run_command(sys.argv[1:])
    # the interpreter looks for cycles once more while it ends: with torch loaded, more than a second for nothing
    gc.disable()
    gc.freeze()
    sys.exit(code)


@functools.cache
def build_command() -> Any:
    """Return the app as a command, with the options that every command has; a process builds it once."""
    click_command = typer.main.get_command(app)
    guard_commands(click_command)
    add_json_options(click_command)
    return click_command
