"""The command line as a function: arguments in, an exit code out."""

import sys
from collections.abc import Sequence

import typer

from phalanx.cli.app import app
from phalanx.cli.console import exit_code_of


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    # the command, not the app: calling the app installs typer's own traceback printer
    return exit_code_of(lambda: typer.main.get_command(app)(args=list(arguments), prog_name="phalanx"))


def main() -> None:
    """Run the process's own command line and exit."""
    sys.exit(run(sys.argv[1:]))
