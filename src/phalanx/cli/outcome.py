"""The one place where an outcome becomes an exit code."""

import sys
from collections.abc import Sequence

from phalanx.cli.app import command
from phalanx.cli.console import say_error
from phalanx.errors import PhalanxError

INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Errors of the tree become one message on stderr. Anything else is a bug and is raised, so
    that Python prints a plain traceback, without the values of variables, and exits with 1.
    """
    try:
        # the command, not the app: calling the app installs typer's own traceback printer
        command()(args=list(arguments), prog_name="phalanx")
    except PhalanxError as exc:
        say_error(str(exc))
        return exc.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    return 0


def main() -> None:
    """Run the process's own command line and exit."""
    sys.exit(run(sys.argv[1:]))
