"""The end of every command: its answer or its error is printed, and an exit code is left."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import typer

from phalanx.cli.answers.answer import Answer, print_object
from phalanx.cli.answers.failure import BUG, INTERRUPTED, USAGE, UsageRefusal, error_object, plain_object, usage_object
from phalanx.cli.console import print_error
from phalanx.errors import InputError, PhalanxError, is_closed, is_disk_fault, writing_cure

INTERRUPTED_EXIT = 130


def exit_code_of(act: Callable[[], object]) -> int:
    """Run a command, print its answer or its error, and return its exit code.

    Errors of the tree become one message on stderr. Anything else is a bug and is raised, so
    that Python prints a plain traceback, without the values of variables, and exits with 1.
    """
    try:
        return _finish_command(act())
    except PhalanxError as exc:
        return _report_failure(exc, {})
    except UsageRefusal as exc:
        from typer.rich_utils import rich_format_error

        rich_format_error(exc)
        typer.echo(f"[{USAGE}]", err=True)
        print_object(usage_object(exc))
        return int(exc.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        print_object(plain_object("interrupted", INTERRUPTED_EXIT, INTERRUPTED))
        return INTERRUPTED_EXIT
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except Exception as exc:
        closed = _closed_file(exc) if isinstance(exc, OSError) else None
        if closed is not None:
            return _report_failure(closed, {})
        print_object(plain_object("a bug in Phalanx; its traceback is on stderr", PhalanxError.exit_code, BUG))
        raise


def _closed_file(exc: OSError) -> InputError | None:
    """Explain an error of a file that this user may not open or write, or that a full disk does not take."""
    name = os.fsdecode(exc.filename) if isinstance(exc.filename, str | bytes) else None
    if name is None or not (is_closed(exc) or is_disk_fault(exc)):
        return None
    do = writing_cure(exc) if is_disk_fault(exc) else "change its permissions, or give another path"
    return InputError(f"{name}: {exc.strerror}; {do}").with_facts(file=name, found=exc.strerror or "", do=do)


def _finish_command(result: object) -> int:
    if not isinstance(result, Answer):
        # a number is the exit code of a command that ended before its answer, such as --help
        return result if isinstance(result, int) else 0
    if result.error is not None:
        return _report_failure(result.error, result.facts)
    print_object(result.facts)
    return result.exit_code


def _report_failure(exc: PhalanxError, found: Mapping[str, Any]) -> int:
    file = exc.error_facts.get("file", "")
    place = f"{file}: " if file and os.path.basename(file) not in str(exc) else ""
    print_error(f"{place}{exc} [{exc.error_facts['code']}]")
    print_object({**found, **error_object(exc)})
    return exc.exit_code
