"""Stages of a run that goes on: ``phalanx plan --measured`` proposes them, ``phalanx train --recut`` takes them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.cli import run_command
from phalanx.cli.planning.recut import LASTING_STEPS, StageCutter
from phalanx.errors import PhalanxError
from phalanx.train import load_run
from tiny_run_file import tiny_run_file

RUN_FILE = tiny_run_file(steps=1000, validate_every=10)


@pytest.fixture
def trained_run(tmp_path: Path) -> Path:
    """A run of four layers in which a worker has two of them and another one has joined."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.toml").write_text(RUN_FILE + "[pipeline]\nstages = 3\n")
    party = {"name": "worker-1", "state": "serving", "serves": [1]}
    rows = [party, {"name": "worker-2", "state": "connected"}, {"name": "worker-3", "state": "evicted"}]
    status = {"run": "run", "step": 2, "steps": 10, "written": 0, "parties": rows}
    (path / "peers.json").write_text(json.dumps(status))
    stages = [{"layers": layers} for layers in ("0-0", "1-2", "3-3")]
    (path / "events.jsonl").write_text(json.dumps({"kind": "run_started", "body": {"stages": stages}}) + "\n")
    line = {
        "phases": {"compute": 0.5},
        "party_phases": {"worker-1": {"step": 0, "seconds": {"compute": 2.0}}, "worker-3": {"step": 0, "seconds": {}}},
    }
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **line}) + "\n" for step in range(2)))
    return path


def test_a_run_that_goes_on_is_cut_by_the_speeds_of_the_parties_that_are_left(
    capsys: pytest.CaptureFixture[str], trained_run: Path
) -> None:
    assert run_command(["plan", "--measured", str(trained_run), "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    # worker-2 has served nothing yet, and is taken for as fast as worker-1; the evicted one counts for nothing
    assert answer["worker_s"] == {"worker-1": 1.0, "worker-2": 1.0}
    assert (answer["stages"], answer["layers"]) == (4, [1, 1, 1, 1])
    assert (answer["slowest_now_s"], answer["slowest_then_s"]) == (2.0, 1.0)
    assert "--set pipeline.stages=4 --set 'pipeline.layers=[1, 1, 1, 1]'" in answer["command"]
    assert run_command(["plan", "--measured", str(trained_run)]) == 0
    assert "worker-2" in capsys.readouterr().out


@pytest.mark.parametrize("claim", [0.0, 5e-324, 1e9])
def test_a_party_that_says_that_it_took_no_time_or_all_of_it_gets_a_cut_and_no_error(
    capsys: pytest.CaptureFixture[str], trained_run: Path, claim: float
) -> None:
    path = trained_run / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"compute": 2.0}', f'{{"compute": {claim!r}}}'))

    assert run_command(["plan", "--measured", str(trained_run), "--json"]) == 0

    answer = json.loads(capsys.readouterr().out)
    assert (answer["stages"], sum(answer["layers"])) == (4, 4)
    assert answer["worker_s"]["worker-1"] >= 1e-6


def test_a_measured_run_says_all_that_is_needed(capsys: pytest.CaptureFixture[str], trained_run: Path) -> None:
    assert run_command(["plan", "--measured", str(trained_run), "--layout", "dp=2"]) == 2

    assert "leave out the other options" in capsys.readouterr().err


def test_a_damaged_log_proposes_no_cut(capsys: pytest.CaptureFixture[str], trained_run: Path) -> None:
    (trained_run / "events.jsonl").write_text("{}\nnot json\n")

    assert run_command(["plan", "--measured", str(trained_run)]) == 2

    assert "no step has the speeds of its parties" in capsys.readouterr().err


def test_without_a_measurement_no_cut_is_proposed(capsys: pytest.CaptureFixture[str], trained_run: Path) -> None:
    (trained_run / "metrics.jsonl").write_text('{"step": 0}\n')

    assert run_command(["plan", "--measured", str(trained_run)]) == 2

    assert "no step has the speeds of its parties" in capsys.readouterr().err


# --- phalanx train --recut --------------------------------------------------------------------------------


def make_cutter(run_dir: Path, *overrides: str) -> StageCutter:
    return StageCutter(load_run(run_dir / "config.toml", overrides), run_dir)


def write_workers(run_dir: Path, *names: str) -> None:
    status = json.loads((run_dir / "peers.json").read_text())
    present = [{"name": name, "state": "connected"} for name in names]
    away = [row for row in status["parties"] if row["state"] == "evicted"]
    first = {"name": "worker-1", "state": "serving", "serves": [1]}
    (run_dir / "peers.json").write_text(json.dumps({**status, "parties": [first, *present, *away]}))


def check_until_cut(cutter: StageCutter, steps: range) -> int | None:
    """The step after which the session ends; None where it goes on."""
    for num_steps in steps:
        try:
            cutter.check_workers(num_steps)
        except KeyboardInterrupt:
            return num_steps
    return None


def test_a_worker_that_stays_gets_a_stage_after_some_steps_and_one_that_left_again_none(trained_run: Path) -> None:
    cutter = make_cutter(trained_run)

    assert check_until_cut(cutter, range(10, 10 + LASTING_STEPS, 10)) is None
    write_workers(trained_run)
    assert check_until_cut(cutter, range(30, 100, 10)) is None
    write_workers(trained_run, "worker-2")
    assert check_until_cut(cutter, range(100, 200, 10)) == 100 + LASTING_STEPS

    pipeline = cutter.run.pipeline
    assert (pipeline.stages, pipeline.layers, pipeline.worker_names) == (4, (1, 1, 1, 1), ("worker-1", "worker-2"))


def test_names_of_convicted_workers_are_left_out_of_the_names_of_new_processes(trained_run: Path) -> None:
    status = json.loads((trained_run / "peers.json").read_text())
    rows = [{**row, "name": row["name"].translate(str.maketrans("23", "32"))} for row in status["parties"]]
    (trained_run / "peers.json").write_text(json.dumps({**status, "parties": rows}))
    cutter = make_cutter(trained_run)

    assert check_until_cut(cutter, range(10, 100, 10)) is not None

    # worker-2 is the convicted one here
    assert cutter.run.pipeline.worker_names == ("worker-1", "worker-2", "worker-3")


def test_workers_of_other_machines_are_awaited_where_they_are_present_and_may_join_where_not(trained_run: Path) -> None:
    remote = ("pipeline.pki='keys'", "pipeline.remote_workers=['worker-1', 'away']", "pipeline.may_join=['worker-2']")
    cutter = make_cutter(trained_run, *remote, "pipeline.stages=3")

    assert check_until_cut(cutter, range(10, 100, 10)) is not None

    pipeline = cutter.run.pipeline
    assert (pipeline.remote_workers, pipeline.may_join) == (("worker-1", "worker-2"), ("away",))


def test_spare_workers_stay_spare_and_too_few_layers_stay_as_they_are(trained_run: Path) -> None:
    assert check_until_cut(make_cutter(trained_run, "pipeline.spares=1"), range(10, 200, 10)) is None

    write_workers(trained_run, "worker-2", "worker-4", "worker-5")
    assert check_until_cut(make_cutter(trained_run), range(10, 200, 10)) is None


def test_a_machine_that_is_so_slow_that_a_stage_of_its_own_would_hold_the_others_up_gets_none(
    trained_run: Path,
) -> None:
    status = json.loads((trained_run / "peers.json").read_text())
    status["parties"][1] |= {"state": "shadowing", "shadows": [1]}
    (trained_run / "peers.json").write_text(json.dumps(status))
    metrics = trained_run / "metrics.jsonl"
    slow = '"worker-2": {"step": 0, "seconds": {"compute": 400.0}}, "worker-3"'
    metrics.write_text(metrics.read_text().replace('"worker-3"', slow))

    assert check_until_cut(make_cutter(trained_run, "guard.shadow='lockstep'"), range(10, 200, 10)) is None


def test_a_worker_that_comes_and_goes_costs_a_tenth_of_the_time_at_most(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("phalanx.cli.planning.recut.time", SimpleNamespace(monotonic=lambda: now_s))
    cutter = make_cutter(trained_run)
    assert check_until_cut(cutter, range(10, 100, 10)) is not None

    write_workers(trained_run)
    now_s = 30.0
    # the first validation of the new session: cutting has taken 30 seconds
    assert check_until_cut(cutter, range(100, 200, 10)) is None
    now_s = 299.0
    assert check_until_cut(cutter, range(200, 300, 10)) is None
    now_s = 300.0
    assert check_until_cut(cutter, range(300, 400, 10)) == 300
    assert cutter.run.pipeline.stages == 3


def test_a_cut_that_cannot_begin_is_taken_back_and_not_tried_again(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions = []

    def train(run: Any, run_dir: Path, **options: Any) -> dict[str, Any]:
        sessions.append((run.pipeline.stages, options["resume"]))
        if run.pipeline.stages == 4:
            raise PhalanxError("stage 2 does not fit")
        for num_steps in range(10, 200, 10):
            try:
                options["on_validation"](num_steps, None)
            except KeyboardInterrupt:
                return {"status": "interrupted"}
        return {"status": "completed"}

    monkeypatch.setattr("phalanx.train.train", train)
    # the time between two cuts is no reason here
    monkeypatch.setattr("phalanx.cli.planning.recut.CUT_SHARE", 1e9)
    summary = make_cutter(trained_run).train_sessions(resume=False, from_step=None, from_run=None)

    assert summary == {"status": "completed"}
    assert sessions == [(3, False), (4, True), (3, True)]
    assert "stage 2 does not fit; the run goes on with 3 stages, as before" in capsys.readouterr().out


@pytest.mark.parametrize("after_cut", [False, True])
def test_errors_of_sessions_that_have_begun_or_were_not_cut_end_the_run(
    trained_run: Path, monkeypatch: pytest.MonkeyPatch, after_cut: bool
) -> None:
    cutter = make_cutter(trained_run)

    def train(run: Any, run_dir: Path, **options: Any) -> dict[str, Any]:
        if after_cut and run.pipeline.stages == 3:
            assert check_until_cut(cutter, range(10, 100, 10)) is not None
            return {"status": "interrupted"}
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2}\n' if after_cut else "")
        raise PhalanxError("out of memory")

    monkeypatch.setattr("phalanx.train.train", train)
    with pytest.raises(PhalanxError, match="out of memory"):
        cutter.train_sessions(resume=False, from_step=None, from_run=None)


def test_a_run_that_is_over_is_not_cut_and_other_workers_begin_anew_to_last(trained_run: Path) -> None:
    assert check_until_cut(make_cutter(trained_run), range(980, 1010, 20)) is None

    cutter = make_cutter(trained_run)
    assert check_until_cut(cutter, range(10, 30, 10)) is None
    write_workers(trained_run, "worker-4")
    assert check_until_cut(cutter, range(30, 100, 10)) == 30 + LASTING_STEPS


def test_a_resumed_run_keeps_its_cut_whatever_its_run_file_begins_with(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE + "[pipeline]\nstages = 4\n")
    seen = []
    monkeypatch.setattr("phalanx.train.train", lambda run, *_, **__: seen.append(run.pipeline.stages) or {})

    StageCutter(load_run(run_file), trained_run).train_sessions(resume=True, from_step=None, from_run=None)

    assert seen == [3]


def test_records_that_say_too_little_end_no_run(trained_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cutter = make_cutter(trained_run)
    (trained_run / "metrics.jsonl").write_text('{"step": 0}\n')

    assert check_until_cut(cutter, range(10, 100, 10)) is None

    assert "the layers stay as they are: " in capsys.readouterr().out
    (trained_run / "peers.json").write_text("[]")
    assert check_until_cut(cutter, range(100, 200, 10)) is None


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("train.validate_every=0",), "train.validate_every"),
        (("pipeline.layouts={'worker-1' = {dp = 2}}", "guard.classes='mixed'"), "no pipeline.layouts"),
    ],
)
def test_runs_whose_layers_cannot_be_cut_by_themselves_are_refused_before_they_begin(
    trained_run: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], expected: str
) -> None:
    words = [word for override in overrides for word in ("--set", override)]

    assert run_command(["train", str(trained_run / "config.toml"), "--recut", *words]) == 2

    assert f"--recut expects {expected}" in capsys.readouterr().err
