"""Metrics sinks get the curves of a run in processes of their own; none of them makes it wait, fail or say more."""

import importlib.util
import json
import os
import re
import select
import sys
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from phalanx.config import open_own_code
from phalanx.config.own_code import pin_reference
from phalanx.errors import ConfigError
from phalanx.telemetry import CurveWriter, Histogram, TensorBoardWriter, open_tracking
from phalanx.telemetry.sinks import MlflowConfig, OwnSinkConfig, SinkConfig, TrackedRun, check_sinks
from phalanx.telemetry.tracking import _value_lines

NOTES = """
import json


class Notes:
    def __init__(self, path):
        self.path = path

    def note(self, *what):
        with open(self.path, "a") as file:
            file.write(json.dumps(what) + chr(10))

    def begin(self, run):
        print("chatter of a library")
        self.note("begin", run.id, run.name, dict(run.config))

    def scalars(self, values, step):
        self.note(step, values)

    def end(self, status):
        self.note("end", status)
"""


def own(tmp_path, text, name="Notes", **keys):
    (tmp_path / "mine.py").write_text(text)
    return OwnSinkConfig(kind=pin_reference(f"mine.py:{name}", tmp_path), **keys)


@pytest.fixture
def track(tmp_path):
    """What sends the curves of a run to these sinks; `said` has what it says."""
    said = []

    def begin(*sinks, config=None) -> CurveWriter:
        run = TrackedRun("0123abcd", "tiny", str(tmp_path / "run"), config or {"train.steps": 3})
        return open_tracking(TensorBoardWriter(tmp_path / "tb"), sinks, run, tmp_path, said.append)

    begin.said = said
    return begin


def notes(path: Path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_sink_is_told_the_run_its_points_and_how_it_ended(track, tmp_path):
    sink = own(tmp_path, NOTES, options={"path": str(tmp_path / "notes")})

    with track(sink) as tracking:
        tracking.add_scalars({"train/loss": 2.5, "train/lr": float("nan")}, 0)
        tracking.add_scalars({"train/loss": float("inf")}, 1)
        tracking.add_scalars({"train/loss": 2.0}, 2)

    assert notes(tmp_path / "notes") == [
        ["begin", "0123abcd", "tiny", {"train.steps": 3}],
        [0, {"train/loss": 2.5}],
        [2, {"train/loss": 2.0}],
        ["end", "completed"],
    ]
    assert tracking.report == [{"kind": "mine.py:Notes", "taken": 2, "dropped": 0, "error": None}]
    assert track.said == []
    # what a library prints is in a file of its own
    assert "chatter of a library" in (tmp_path / "run" / "tracking" / "0-own" / "sink.log").read_text()


DRAWN = Histogram("weights", "h.0.w", -1.0, 1.0, (3, 4), 1)


def test_a_sink_that_takes_histograms_gets_them_and_any_other_gets_curves_alone(track, tmp_path):
    draws = """
    def histogram(self, drawn, step):
        self.note(step, drawn.tag, drawn.edges, drawn.counts, drawn.not_finite)
"""
    sink = own(tmp_path, NOTES.replace("class Notes", "class Plain") + NOTES + draws, options={"path": "drawn"})
    plain = own(tmp_path, (tmp_path / "mine.py").read_text(), "Plain", options={"path": "plain"})
    sinks = [one.model_copy(update={"options": {"path": str(tmp_path / one.options["path"])}}) for one in (sink, plain)]

    with track(*sinks) as tracking:
        tracking.add_scalars({"loss": 1.0}, 0)
        tracking.add_histograms([DRAWN], 1)

    assert notes(tmp_path / "drawn")[1:-1] == [[0, {"loss": 1.0}], [1, "weights/h.0.w", [-1.0, 0.0, 1.0], [3, 4], 1]]
    assert notes(tmp_path / "plain")[1:-1] == [[0, {"loss": 1.0}]]
    assert [(line["taken"], line["dropped"]) for line in tracking.report] == [(2, 0), (1, 0)]


def test_a_histogram_that_is_longer_than_a_line_is_dropped_and_counted(track, tmp_path):
    sink = own(tmp_path, NOTES, options={"path": str(tmp_path / "notes")})

    with track(sink) as tracking:
        tracking.add_histograms([Histogram("weights", "w", 0.0, 1.0, (10**30,) * 128)], 1)

    assert tracking.report[0]["dropped"] == 1


@pytest.mark.quick_cases("ValueError-failed")
@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")])
def test_a_sink_is_told_of_a_run_that_broke_off(track, tmp_path, error, status):
    sink = own(tmp_path, NOTES, options={"path": str(tmp_path / "notes")})

    with pytest.raises(error), track(sink) as tracking:
        tracking.add_scalars({"loss": 1.0}, 0)
        raise error

    assert notes(tmp_path / "notes")[-1] == ["end", status]


@pytest.mark.quick_cases("at?a?point", "when?it?is?made")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        (NOTES.replace("self.note(step, values)", "{}[step]"), "KeyError: 0"),
        (NOTES.replace('print("chatter of a library")', "import sys; sys.exit(4)"), "exit code 4"),
        (NOTES.replace('self.note("end", status)', "1 / 0"), "ZeroDivisionError"),
        (NOTES.replace("def __init__(self, path)", "def __init__(self)"), "unexpected keyword argument 'path'"),
    ],
    ids=["at a point", "at the beginning", "at the end", "when it is made"],
)
def test_a_sink_that_raises_is_named_once_and_the_run_goes_on(track, tmp_path, text, why):
    failing = own(tmp_path, text, options={"path": str(tmp_path / "gone")})
    other = tmp_path / "other"
    other.mkdir()

    with track(failing) as tracking:
        for step in range(50):
            tracking.add_scalars({"loss": 1.0}, step)

    (line,) = track.said
    assert line.startswith("tracking: mine.py:Notes has ended, the run goes on: ")
    assert tracking.report[0]["taken"] is None
    assert why in tracking.report[0]["error"]


STUCK = NOTES.replace("self.note(step, values)", "import time; time.sleep(600)")


def test_a_sink_that_stands_still_holds_up_no_step_and_is_ended_in_time(track, tmp_path):
    stuck = own(tmp_path, STUCK, options={"path": str(tmp_path / "notes")}, flush_s=0.2)
    longest, tracking = "x" * 180, track(stuck)
    began = time.process_time()

    with tracking:
        for step in range(8_000):
            tracking.add_scalars({longest: 1.0}, step)
        process = tracking._sinks[0]._process
        assert process.poll() is None

    assert time.process_time() - began < 60
    (report,) = tracking.report
    # the pipe holds at most a mebibyte of lines
    assert 8_000 - (1 << 20) // 180 <= report["dropped"] < 8_000
    assert report["error"] == "had not taken everything after 0.2 s and was ended"
    assert process.poll() == -9


def test_names_that_another_party_might_choose_are_made_harmless():
    (line,) = _value_lines({"loss\x1b[2J\u202e\n": 1.0, "x" * 5000: 2.0}, 3)

    assert json.loads(line) == {"step": 3, "values": {"loss?[2J??": 1.0, "x" * 200: 2.0}}


def test_a_long_row_is_cut_into_lines_that_are_written_as_a_whole():
    values = {f"layer.{number}.{'w' * 60}": float(number) for number in range(500)}

    lines = list(_value_lines(values, 7))

    assert max(map(len, lines)) <= select.PIPE_BUF
    found = [json.loads(line) for line in lines]
    assert {name: value for one in found for name, value in one["values"].items()} == values
    assert {one["step"] for one in found} == {7}


def test_without_a_section_no_process_is_started(track, monkeypatch):
    monkeypatch.setattr("phalanx.telemetry.tracking.PythonProcess", None)

    with track() as tracking:
        tracking.add_scalars({"loss": 1.0}, 0)

    assert tracking.report == []


def test_a_sink_of_the_users_own_is_loaded_in_its_own_process_too_and_not_if_it_changed(track, tmp_path):
    sink = own(tmp_path, NOTES, options={"path": str(tmp_path / "notes")})
    (tmp_path / "mine.py").write_text(NOTES + "# changed\n")

    with track(sink) as tracking:
        pass

    assert "expected" in tracking.report[0]["error"]
    assert not (tmp_path / "notes").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Notes = 3\n", "found a int; expected a class or function that makes a metrics sink"),
        (NOTES.replace("def begin", "def start"), r"without begin\(\); expected a metrics sink, with begin\(run\)"),
    ],
)
def test_an_object_that_is_no_sink_is_refused_before_the_run(tmp_path, text, said):
    sink = own(tmp_path, text)
    open_own_code(sink.kind, tmp_path)

    with pytest.raises(ConfigError, match=rf"tracking\.0: mine\.py:Notes: .*{said}"):
        check_sinks([sink])


@pytest.mark.parametrize("kind", ["wandb", "mlflow", "trackio"])
def test_a_sink_without_its_extra_is_refused_before_the_run(kind, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = TypeAdapter(SinkConfig).validate_python({"kind": kind})

    with pytest.raises(ConfigError, match=rf"tracking\.0: {kind}: needs {kind}; install phalanx-train\[{kind}\]"):
        check_sinks([config])


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"kind": "tensorboard"}, "does not match any of the expected tags: 'wandb', 'mlflow', 'trackio'"),
        ({"kind": "wandb", "api_key": "x"}, "Extra inputs are not permitted"),
        ({"kind": "mlflow", "uri": "https://me:secret@example.org"}, "set MLFLOW_TRACKING_USERNAME"),
        ({"kind": "trackio", "project": "a/b"}, "should match pattern"),
    ],
)
def test_what_a_run_file_may_not_say_of_a_sink_is_refused(section, said):
    with pytest.raises(ValidationError, match=said):
        TypeAdapter(SinkConfig).validate_python(section)


def test_a_password_is_not_repeated_by_the_refusal():
    with pytest.raises(ValidationError) as refused:
        MlflowConfig(uri="https://me:hunter2@example.org")

    assert "hunter2" not in str(refused.value.errors()[0]["ctx"]["error"])


def library(name):
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"the extra `{name}` is not installed")


@pytest.mark.slow
@library("mlflow")
def test_mlflow_gets_the_curves_and_a_resumed_run_is_the_same_run(track, tmp_path):
    for first in (0, 2):
        with track(MlflowConfig(flush_s=600)) as tracking:
            tracking.add_scalars({"train/loss": 3.0 - first}, first)
            tracking.add_scalars({"train/loss": 2.0 - first}, first + 1)
        assert tracking.report == [{"kind": "mlflow", "taken": 2, "dropped": 0, "error": None}]

    folder = tmp_path / "run" / "tracking" / "0-mlflow" / "mlruns"
    (curve,) = folder.rglob("metrics/train/loss")
    rows = [line.split() for line in curve.read_text().splitlines()]
    assert [(float(value), int(step)) for _, value, step in rows] == [(3.0, 0), (2.0, 1), (1.0, 2), (0.0, 3)]
    (parameter,) = folder.rglob("params/train.steps")
    assert parameter.read_text() == "3"


@pytest.mark.slow
@library("wandb")
def test_wandb_writes_the_curves_offline(track, tmp_path):
    config = TypeAdapter(SinkConfig).validate_python({"kind": "wandb", "mode": "offline", "flush_s": 120})

    with track(config) as tracking:
        tracking.add_scalars({"validation/loss": 2.0}, 1)
        # what is known of a step later than of the next one counts as well
        tracking.add_scalars({"train/loss": 3.0}, 0)

    assert tracking.report == [{"kind": "wandb", "taken": 2, "dropped": 0, "error": None}]
    (file,) = (tmp_path / "run").rglob("run-0123abcd.wandb")
    content = file.read_bytes()
    assert b"train/loss" in content
    assert "will be ignored" not in (tmp_path / "run" / "tracking" / "0-wandb" / "sink.log").read_text(encoding="utf-8")
    # nothing of this machine
    assert os.uname().nodename.encode() not in re.findall(rb"[\w.-]+", content)
    assert sys.executable.encode() not in content


@pytest.mark.slow
@library("trackio")
def test_trackio_keeps_the_curves_on_this_machine_whatever_the_environment_says(track, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somewhere/else")
    config = TypeAdapter(SinkConfig).validate_python({"kind": "trackio", "flush_s": 120})

    with track(config) as tracking:
        tracking.add_scalars({"train/loss": 3.0}, 0)

    assert tracking.report == [{"kind": "trackio", "taken": 1, "dropped": 0, "error": None}]
    assert b"train/loss" in (tmp_path / "trackio" / "phalanx.db").read_bytes()
