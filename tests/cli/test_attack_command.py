"""``phalanx attack`` parses, calls the drill, prints its table, and exits with 5 when the guard did not hold."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from phalanx.cli import run_command

ROW = {"attack": "drift", "detected": True}


@pytest.fixture
def drills(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands in for what trains; `calls` remembers how, `passed` is what comes of it."""
    monkeypatch.setenv("COLUMNS", "110")
    module: Any = ModuleType("phalanx.lab.bench.detection.drills")
    module.calls, module.passed = [], True
    module.list_attacks = lambda: [{"attack": "drift", "what it does": "moves a little"}]

    def run_drill(run_file: Any, drill: Any, directory: Path | None) -> dict[str, Any]:
        module.calls.append((run_file, drill, directory))
        return {"passed": module.passed, "rows": [ROW]}

    module.run_drill = run_drill
    training: Any = ModuleType("phalanx.train")
    training.load_run = lambda path, overrides: (path.name, *overrides)
    plan: Any = ModuleType("phalanx.lab.bench.detection.drill_plan")
    plan.Drill = dict
    monkeypatch.setitem(sys.modules, "phalanx.lab.bench.detection.drill_plan", plan)
    monkeypatch.setitem(sys.modules, "phalanx.lab.bench.detection.drills", module)
    monkeypatch.setitem(sys.modules, "phalanx.train", training)
    return module


def test_the_drill_gets_what_the_command_line_says(drills, tmp_path: Path) -> None:
    options = ["--kinds", "drift,framing", "--rate", "0.5", "--steps", "8", "--stages", "1,2", "--set", "train.seed=3"]

    assert run_command(["attack", "run.toml", *options, "--run-dir", str(tmp_path)]) == 0

    ((run_file, drill, directory),) = drills.calls
    assert run_file == ("run.toml", "train.seed=3")
    assert drill == {
        "kinds": ("drift", "framing"),
        "together": (),
        "steps": 8,
        "from_step": None,
        "rate": 0.5,
        "stages": (1, 2),
    }
    assert directory == tmp_path


def test_attackers_who_act_together_and_a_first_step_are_passed_on(drills) -> None:
    options = ["--attack", "scale:stages=[1]:strength=3", "--attack", "framing:stages=[2]", "--from-step", "5"]

    assert run_command(["attack", "run.toml", *options]) == 0

    drill = drills.calls[0][1]
    assert drill["together"] == ("scale:stages=[1]:strength=3", "framing:stages=[2]")
    assert drill["from_step"] == 5


def test_without_options_the_run_file_says_what_is_tried(drills, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["attack", "run.toml"]) == 0

    drill = drills.calls[0][1]
    assert [drill[key] for key in ("kinds", "together", "from_step", "rate", "stages")] == [None, (), None, None, None]
    assert "drift" in capsys.readouterr().out


def test_an_attacked_run_that_broke_off_is_told(drills, capsys: pytest.CaptureFixture[str]) -> None:
    drills.run_drill = lambda *_: {"passed": False, "rows": [ROW | {"error": "PeerLostError: all are gone"}]}

    assert run_command(["attack", "run.toml"]) == 5

    assert "drift did not finish  PeerLostError: all are gone" in capsys.readouterr().out


def test_a_guard_that_did_not_hold_is_exit_code_5(drills, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drills.passed = False

    assert run_command(["attack", "run.toml", "--json", "--out", str(tmp_path / "out.json")]) == 5

    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "out.json").read_text())


def test_the_list_trains_nothing(drills, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["attack", "--list"]) == 0

    assert "moves a little" in capsys.readouterr().out
    assert drills.calls == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "the run file is missing"), (["run.toml", "--stages", "one"], "expected stage numbers such as 1,2")],
)
def test_what_cannot_be_meant_is_refused(arguments, message, drills, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["attack", *arguments]) == 2

    assert message in capsys.readouterr().err
    assert drills.calls == []
