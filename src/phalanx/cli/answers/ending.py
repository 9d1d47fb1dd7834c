"""The end of every command: its answer or its error is printed, and an exit code is left."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import typer

from phalanx.cli.answers.answer import Answer, print_object
from phalanx.cli.console import print_error
from phalanx.cli.explain import error_pages
from phalanx.errors import FACTS, InputError, PhalanxError, is_closed, is_disk_fault, writing_cure

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
    do = writing_cure(exc)
    return InputError(f"{name}: {exc.strerror}; {do}").with_facts(file=name, found=exc.strerror or "", do=do)


def _finish_command(result: object) -> int:
    if not isinstance(result, Answer):
        # a number is the exit code of a command that ended before its answer, such as --help
        return result if isinstance(result, int) else 0
    if result.error is not None:
        return _report_failure(result.error, result.facts)
    print_object(result.facts)
    return result.exit_code


def _report_failure(exc: PhalanxError, results: Mapping[str, Any]) -> int:
    file = exc.error_facts.get("file", "")
    place = f"{file}: " if file and os.path.basename(file) not in str(exc) else ""
    print_error(f"{place}{exc} [{exc.error_facts['code']}]")
    print_object({**results, **error_object(exc)})
    return exc.exit_code
