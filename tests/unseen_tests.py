"""A pytest plugin: failures of tests that have never been seen green are listed, and do not fail the run.

``--unseen FILE`` reads a line for each such file, or for a test of it; what follows a ``#`` is a remark. A failure of
any other test fails the run, so the list can only shrink: a new test is not on it.
"""

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest


def read_unseen(text: str) -> list[str]:
    """The files and tests of a list.

    Raises:
        ValueError: A line names no file of tests, and would excuse too much.
    """
    lines = [line for raw in text.splitlines() if (line := raw.partition("#")[0].strip())]
    if wrong := [line for line in lines if not line.partition("::")[0].endswith(".py")]:
        raise ValueError(f"unseen tests: expected a file or a test, such as tests/a/test_b.py, got {wrong[0]!r}")
    return lines


def is_unseen(test: str, unseen: Iterable[str]) -> bool:
    """Whether a line is this test, the function that it is a case of, or its file."""
    return bool({test, test.partition("[")[0], test.partition("::")[0]} & set(unseen))


class Unseen:
    """The plugin of one session, in the process that sees all reports."""

    def __init__(self, unseen: list[str]) -> None:
        self._unseen = unseen
        self._failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected has not been seen green, and is excused by no list."""
        if report.failed:
            self._failed[f"{report.nodeid} (collection)"] = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Take back the failure of the run where all that failed is on the list, before others look at it."""
        counted = [test for test in self._failed if not is_unseen(test, self._unseen)]
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED and self._failed and not counted:
            session.exitstatus = pytest.ExitCode.OK
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name what failed and does not count."""
        excused = [test for test in self._failed if is_unseen(test, self._unseen)]
        if excused:
            terminalreporter.section(f"{len(excused)} FAILED that were never seen green; they do not fail this run")
            for test in excused:
                terminalreporter.line(test, red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("phalanx")
    group.addoption("--unseen", type=Path, metavar="FILE", help="failures of the tests in this list do not fail")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--unseen")
    if path and not hasattr(config, "workerinput"):
        try:
            config.pluginmanager.register(Unseen(read_unseen(path.read_text(encoding="utf-8"))), "phalanx-unseen")
        except (ValueError, OSError) as exc:
            raise pytest.UsageError(str(exc)) from exc
