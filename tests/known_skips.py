"""A pytest plugin: skips are listed by name and reason, and one that no list allows fails the run.

``--known-skips FILE`` reads a TOML file of tables ``[[skip]]``: `test` and `reason` are what the test's name and
the reason of its skip begin with, `because` says why it cannot run there. A name that is listed does not have
to be skipped. ``--list-skips FILE`` appends the list to a file, for a log that has several calls of pytest.
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from slow_shares import is_not_run


@dataclass(frozen=True)
class Known:
    """One allowed skip."""

    test: str
    reason: str
    because: str

    def covers(self, test: str, reason: str) -> bool:
        return test.startswith(self.test) and reason.startswith(self.reason)


def read_known(text: str) -> list[Known]:
    """Read the allowed skips.

    Raises:
        ValueError: An entry lacks a key, has another one, or one that is empty and so would allow too much.
    """
    wanted = {field.name for field in fields(Known)}
    entries = tomllib.loads(text).get("skip", [])
    for entry in entries:
        if set(entry) != wanted or not all(isinstance(value, str) and value.strip() for value in entry.values()):
            raise ValueError(f"known skips: each needs {', '.join(sorted(wanted))} and nothing else, got {entry}")
    return [Known(**entry) for entry in entries]


def unknown(skips: Iterable[tuple[str, str]], known: Sequence[Known]) -> list[tuple[str, str]]:
    """The skips that no entry covers."""
    return [skip for skip in skips if not any(entry.covers(*skip) for entry in known)]


def reason_of(report: Any) -> str:
    return str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")


class Skips:
    """The plugin of one session, in the process that sees all reports."""

    def __init__(self, known: Path | None, out: Path | None) -> None:
        self._known = None if known is None else read_known(known.read_text(encoding="utf-8"))
        self._out = out
        self._skips: dict[tuple[str, str], None] = {}

    def _take(self, report: Any) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and not is_not_run(report):
            self._skips[report.nodeid, reason_of(report)] = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._take(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that skips itself is a skip as well."""
        self._take(report)

    def _unknown(self) -> list[tuple[str, str]]:
        return [] if self._known is None else unknown(self._skips, self._known)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail where a skip is unknown; append the list to the file."""
        if self._unknown() and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._out is not None:
            with self._out.open("a", encoding="utf-8") as out:
                out.writelines(f"{test}: {reason}\n" for test, reason in self._skips)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List all skips, the unknown ones last."""
        if self._known is None:
            return
        terminalreporter.section(f"{len(self._skips)} skips")
        for test, reason in self._skips:
            terminalreporter.line(f"{test}: {reason}")
        for test, reason in self._unknown():
            terminalreporter.line(f"NEW SKIP, not in the list of known ones: {test}: {reason}", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("phalanx")
    group.addoption("--known-skips", type=Path, metavar="FILE", help="fail when a skip is not in this list")
    group.addoption("--list-skips", type=Path, metavar="FILE", help="append the skips, a line each, to this file")


def pytest_configure(config: pytest.Config) -> None:
    known, out = config.getoption("--known-skips"), config.getoption("--list-skips")
    if (known or out) and not hasattr(config, "workerinput"):
        try:
            config.pluginmanager.register(Skips(known, out), "phalanx-skips")
        except (ValueError, OSError) as exc:
            raise pytest.UsageError(str(exc)) from exc
