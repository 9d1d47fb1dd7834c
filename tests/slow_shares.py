"""A pytest plugin: which share of the collected tests a run of CI takes, and for how long.

``--share TURN/N`` keeps one of N shares. Tests stay in the order of collection, so that tests of one file share
what they have trained; the shares are consecutive pieces of about equal recorded time. Each test is in exactly one of
them, and N turns that follow each other run every test once. Each time the turns have gone round, a share begins a
third further on: what the budget cut off last time is not cut off again.

``--budget-s S`` begins no test that would, by its recorded time, end later than S seconds after the session began.
Such a test is reported as not run, by name, and never as passed. ``--write-seconds FILE`` records the times.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
RECORD = ROOT / ".ci" / "slow_seconds.json"
UNKNOWN_S = 30.0
THIRDS = 3
NOT_RUN = "not run: the budget of "


def file_of(test: str) -> str:
    return test.partition("::")[0]


def expected_s(test: str, record: Mapping[str, float]) -> float:
    """The recorded mean time of a test of this file, or a guess."""
    return record.get(file_of(test), UNKNOWN_S)


def parse_share(text: str) -> tuple[int, int]:
    """Read ``TURN/N``.

    Raises:
        ValueError: It is not two whole numbers, or N is below one, or the turn below zero.
    """
    turn, _, num_shares = text.partition("/")
    if not (turn.isdecimal() and num_shares.isdecimal() and int(num_shares)):
        raise ValueError(f"--share: expected TURN/N, such as 712/8, got {text!r}")
    return int(turn), int(num_shares)


def share_of(tests: Sequence[str], turn: int, num_shares: int, record: Mapping[str, float]) -> list[str]:
    """The tests of this turn, in the order in which to run them."""
    costs = [max(expected_s(test, record), 0.001) for test in tests]
    total = sum(costs)
    middles = [end - cost / 2 for end, cost in zip(accumulate(costs), costs, strict=True)]
    mine = [
        test
        for test, middle in zip(tests, middles, strict=True)
        if min(int(num_shares * middle / total), num_shares - 1) == turn % num_shares
    ]
    first = len(mine) * (turn // num_shares % THIRDS) // THIRDS
    return mine[first:] + mine[:first]


def fits(test: str, elapsed_s: float, budget_s: float, record: Mapping[str, float]) -> bool:
    """Whether a test that begins now is expected to end within the budget."""
    return elapsed_s + expected_s(test, record) <= budget_s


def means(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean seconds a test for each file, from (test, seconds of one phase of it)."""
    totals: dict[str, float] = {}
    tests: dict[str, set[str]] = {}
    for test, phase_s in seconds:
        totals[file_of(test)] = totals.get(file_of(test), 0.0) + phase_s
        tests.setdefault(file_of(test), set()).add(test)
    return {file: round(totals[file] / len(tests[file]), 1) for file in sorted(totals)}


def read_record(path: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


class Shares:
    """The plugin of one session."""

    def __init__(self, config: pytest.Config) -> None:
        self._share = parse_share(config.getoption("--share")) if config.getoption("--share") else None
        self._budget_s = config.getoption("--budget-s")
        self._out = config.getoption("--write-seconds")
        self._record = read_record(RECORD)
        self._began_s = time.monotonic()
        self._seconds: list[tuple[str, float]] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the share, after `-m` and `-k` have taken out theirs."""
        if self._share is None:
            return
        by_name = {item.nodeid: item for item in items}
        mine = share_of(list(by_name), *self._share, self._record)
        config.hook.pytest_deselected(items=[by_name[name] for name in by_name.keys() - set(mine)])
        items[:] = [by_name[name] for name in mine]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin nothing that would not end within the budget."""
        elapsed_s = time.monotonic() - self._began_s
        if self._budget_s is not None and not fits(item.nodeid, elapsed_s, self._budget_s, self._record):
            pytest.skip(f"{NOT_RUN}{self._budget_s:.0f} s is used up")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the seconds of tests that passed."""
        if report.passed:
            self._seconds.append((report.nodeid, report.duration))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the record; files of which no test passed keep their old figure."""
        if self._out and not hasattr(session.config, "workerinput"):
            path = Path(self._out)
            text = json.dumps(dict(sorted((read_record(path) | means(self._seconds)).items())), indent=2)
            path.write_text(text + "\n", encoding="utf-8")


def is_not_run(report: Any) -> bool:
    """Whether a report stands for a test that the budget left out."""
    return bool(report.skipped) and isinstance(report.longrepr, tuple) and NOT_RUN in report.longrepr[2]


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Count what the budget left out under a name of its own."""
    return ("not run", "n", "NOT RUN") if is_not_run(report) else None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name what the budget left out."""
    left = terminalreporter.stats.get("not run", [])
    if left:
        terminalreporter.section(f"{len(left)} tests of this share were not run")
        for report in left:
            terminalreporter.line(report.nodeid)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("phalanx")
    group.addoption("--share", metavar="TURN/N", help="run one of N shares of the collected tests; TURN counts up")
    group.addoption("--budget-s", type=float, metavar="S", help="begin no test that would end after S seconds")
    group.addoption("--write-seconds", metavar="FILE", help="record the mean seconds of a test of each file")


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.pluginmanager.register(Shares(config), "phalanx-shares")
    except ValueError as exc:
        raise pytest.UsageError(str(exc)) from exc
