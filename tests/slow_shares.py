"""A pytest plugin: which share of the collected tests a run of CI takes, and for how long.

``--share TURN/N`` keeps one of N shares. Tests stay in the order of collection, so that tests of one file share
what they have trained; the shares are consecutive pieces of about equal recorded time. Each test is in exactly one of
them, and N turns that follow each other run every test once. Each time the turns have gone round, a share begins a
third further on: what the budget cut off last time is not cut off again. Tests that are marked
``xdist_group("name")`` share something so expensive that they are never cut apart.

``@pytest.mark.quick_cases("id", "other-*")`` names the cases of a parametrised test that stay quick, each by its id or
a pattern of `fnmatch`; the other cases are slow. A name that no case has is an error of the collection.

What hypothesis draws is slow too where the slow tests are asked for, with its hundred examples; the quick tests draw a
quarter of them.

``--budget-s S`` begins no test that would, by its recorded time, end later than S seconds after the session began.
Such a test is reported as not run, by name, and never as passed. ``--write-seconds FILE`` records the times: seconds
of a processor, since a clock would say how busy the machine was (`spent_cpu`).
"""

import json
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from spent_cpu import spent_s

ROOT = Path(__file__).parent.parent
RECORD = ROOT / ".ci" / "slow_seconds.json"
UNKNOWN_S = 30.0
DRAWN_S = 1.0
"""What a test that hypothesis draws takes, where no record knows it."""
THIRDS = 3
NOT_RUN = "not run: the budget of "
NO_GROUPS: Mapping[str, str] = MappingProxyType({})


def function_of(test: str) -> str:
    """A test's file and function, without its parameters."""
    return test.partition("[")[0]


def expected_s(test: str, record: Mapping[str, float]) -> float:
    """The recorded mean time of a test of this function, or a guess."""
    return record.get(function_of(test), UNKNOWN_S)


def parse_share(text: str) -> tuple[int, int]:
    """Read ``TURN/N``.

    Raises:
        ValueError: It is not two whole numbers, or N is below one, or the turn below zero.
    """
    turn, _, num_shares = text.partition("/")
    if not (turn.isdecimal() and num_shares.isdecimal() and int(num_shares)):
        raise ValueError(f"--share: expected TURN/N, such as 712/8, got {text!r}")
    return int(turn), int(num_shares)


def share_of(
    tests: Sequence[str],
    turn: int,
    num_shares: int,
    record: Mapping[str, float],
    groups: Mapping[str, str] = NO_GROUPS,
) -> list[str]:
    """The tests of this turn, in the order in which to run them; `groups` names those that are never cut apart."""
    units = [list(unit) for _, unit in groupby(tests, lambda test: groups.get(test, test))]
    costs = [max(sum(expected_s(test, record) for test in unit), 0.001) for unit in units]
    total = sum(costs)
    middles = [end - cost / 2 for end, cost in zip(accumulate(costs), costs, strict=True)]
    mine = [
        unit
        for unit, middle in zip(units, middles, strict=True)
        if min(int(num_shares * middle / total), num_shares - 1) == turn % num_shares
    ]
    first = len(mine) * (turn // num_shares % THIRDS) // THIRDS
    return [test for unit in mine[first:] + mine[:first] for test in unit]


def fits(cost_s: float, elapsed_s: float, budget_s: float) -> bool:
    """Whether what begins now is expected to end within the budget."""
    return elapsed_s + cost_s <= budget_s


def means(seconds: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Mean seconds of a test for each function, from (test, seconds)."""
    found: dict[str, list[float]] = {}
    for test, test_s in seconds:
        found.setdefault(function_of(test), []).append(test_s)
    return {function: round(sum(found[function]) / len(found[function]), 1) for function in sorted(found)}


def mark_slow_cases(items: Iterable[pytest.Item]) -> list[str]:
    """Mark the cases of one test that `quick_cases` does not name as slow; return its names that no case has."""
    unused: dict[str, None] = {}
    used: set[str] = set()
    for item in items:
        patterns = [pattern for mark in item.iter_markers("quick_cases") for pattern in mark.args]
        case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
        matching = [pattern for pattern in patterns if fnmatchcase(case, pattern)]
        if patterns and not matching:
            item.add_marker(pytest.mark.slow)
        unused |= dict.fromkeys(patterns)
        used |= {*matching}
    return [pattern for pattern in unused if pattern not in used]


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str) -> Generator[None, Any, Any]:
    """Mark the slow cases of each test as it is collected, whatever is selected later."""
    made = yield
    if isinstance(made, list) and (unused := mark_slow_cases(made)):
        raise collector.CollectError(f"{name}: quick_cases names {', '.join(unused)}, which no case is called")
    return made


def is_drawn(item: pytest.Item) -> bool:
    """Whether hypothesis draws the arguments of a test."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark drawn tests as slow before `-m slow` takes out what is not."""
    if config.option.markexpr == "slow":
        for item in filter(is_drawn, items):
            item.add_marker(pytest.mark.slow)


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
        self._groups: dict[str, str] = {}
        self._begun: set[str] = set()
        self._spent_s = 0.0
        self._seconds: dict[str, float] = {}
        self._not_passed: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the share, after `-m` and `-k` have taken out theirs."""
        self._groups = {
            item.nodeid: str(mark.args[0]) for item in items if (mark := item.get_closest_marker("xdist_group"))
        }
        if self._share is None:
            return
        self._record = {function_of(item.nodeid): DRAWN_S for item in items if is_drawn(item)} | self._record
        by_name = {item.nodeid: item for item in items}
        mine = share_of(list(by_name), *self._share, self._record, self._groups)
        config.hook.pytest_deselected(items=[by_name[name] for name in by_name.keys() - set(mine)])
        items[:] = [by_name[name] for name in mine]

    def pytest_collection_finish(self) -> None:
        """What imports and collection have taken is no test's."""
        self._spent_s = spent_s() if self._out else 0.0

    def _cost_s(self, test: str) -> float:
        """What is expected of a test; the first of a group makes what all of them share."""
        group = self._groups.get(test)
        if group is None:
            return expected_s(test, self._record)
        together = (other for other, name in self._groups.items() if name == group)
        return 0.0 if group in self._begun else sum(expected_s(other, self._record) for other in together)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin nothing that would not end within the budget."""
        elapsed_s = time.monotonic() - self._began_s
        if self._budget_s is not None and not fits(self._cost_s(item.nodeid), elapsed_s, self._budget_s):
            pytest.skip(f"{NOT_RUN}{self._budget_s:.0f} s is used up")
        if item.nodeid in self._groups:
            self._begun.add(self._groups[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Say in the last report of a test what it took; it goes from a test worker to where the record is written."""
        report = yield
        if self._out and call.when == "teardown":
            now_s = spent_s()
            vars(report)["cpu_s"], self._spent_s = now_s - self._spent_s, now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the seconds of tests that passed."""
        if not report.passed:
            self._not_passed.add(report.nodeid)
        if "cpu_s" in vars(report) and report.nodeid not in self._not_passed:
            self._seconds[report.nodeid] = vars(report)["cpu_s"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the record; functions of which no test passed keep their old figure."""
        if self._out and not hasattr(session.config, "workerinput"):
            path = Path(self._out)
            text = json.dumps(dict(sorted((read_record(path) | means(self._seconds.items())).items())), indent=2)
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
    group.addoption("--write-seconds", metavar="FILE", help="record the mean seconds of a test of each function")


def pytest_configure(config: pytest.Config) -> None:
    try:
        config.pluginmanager.register(Shares(config), "phalanx-shares")
    except ValueError as exc:
        raise pytest.UsageError(str(exc)) from exc
