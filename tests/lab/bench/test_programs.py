"""A program of `lab/bench/alone`: its options are the parameters of its function, its arms take turns."""

import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from phalanx.errors import TrainingError
from phalanx.lab.bench.measure.harness import CallTime, median_ratio, run_module, run_program, time_call, time_turns


def measure(
    work: Path, path: Literal["short", "long"], rounds: int = 3, sizes: list[int] | None = None, note: str = ""
) -> dict[str, Any]:
    # the path of the result was resolved before
    os.chdir(work)
    return {"rows": [path, rounds, sizes, note]}


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    run_program("tried", measure)


def test_the_parameters_are_the_options_and_the_call_is_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()

    call(monkeypatch, "out.json", "--work", "work", "--path", "long", "--sizes", "4", "5")

    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (result["name"], result["rows"]) == ("tried", ["long", 3, [4, 5], ""])
    assert result["command"].endswith("OUT.json --work WORK --path long --rounds 3 --sizes 4 5")
    assert {"machine", "commit", "load"} <= result.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--path", "long"),
        ("--work", ".", "--path", "other"),
        ("--work", ".", "--path", "long", "--rounds", "many"),
        ("--work", ".", "--path", "long", "--other", "1"),
    ],
)
def test_a_call_that_the_function_does_not_take_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, "out.json", *arguments)

    assert ended.value.code == 2
    assert not (tmp_path / "out.json").exists()


def test_actions_take_turns_and_warm_ups_do_not_count() -> None:
    calls: list[str] = []

    samples = time_turns(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        2,
        1,
        lambda name: calls.append(f"before {name}"),
    )

    assert calls == ["before a", "a", "before b", "b"] * 3
    assert {name: len(of_action) for name, of_action in samples.items()} == {"a": 2, "b": 2}
    assert all(sample.wall_s >= 0 and sample.cpu_s >= 0 for of_action in samples.values() for sample in of_action)


def test_a_clock_of_the_callers_is_read_before_and_after() -> None:
    clock = iter([1.0, 3.5])

    assert time_call(lambda: None, lambda: next(clock)).cpu_s == 2.5
    assert CallTime(1.0, 2.0) == (1.0, 2.0)
    assert median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0


def test_a_module_runs_to_its_end_and_a_failure_is_named() -> None:
    ended = run_module("platform")

    assert ended.output.startswith("Linux") and ended.seconds.keys() == {"wall_s", "cpu_s"}
    with pytest.raises(TrainingError, match="no_such_module_here ended with 1"):
        run_module("no_such_module_here")
