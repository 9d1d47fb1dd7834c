"""The command line as a function: arguments in, an exit code out."""

import re
import sys
from collections.abc import Sequence
from typing import Any

import typer

from phalanx.cli.app import app
from phalanx.cli.console import exit_code_of

_TAG = re.compile(r"(?=\[[a-zA-Z#/@])")
"""Before what rich takes for the beginning of a tag."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    # the command, not the app: calling the app installs typer's own traceback printer
    return exit_code_of(lambda: _command()(args=list(arguments), prog_name="phalanx"))


def main() -> None:
    """Run the process's own command line and exit."""
    sys.exit(run(sys.argv[1:]))


def _command() -> Any:
    """Return the app as a command with help that keeps words in square brackets, such as the name of a section."""
    made = typer.main.get_command(app)
    _keep_brackets(made)
    return made


def _keep_brackets(part: Any) -> None:
    for name in ("help", "short_help", "epilog"):
        if getattr(part, name, None):
            setattr(part, name, _TAG.sub(r"\\", getattr(part, name)))
    for below in (*getattr(part, "params", ()), *getattr(part, "commands", {}).values()):
        _keep_brackets(below)
