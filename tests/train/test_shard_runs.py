"""Runs that train from shards: phases, document attention, a stop in the middle, and what --resume may change."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from machine_patience import patience_s
from phalanx.errors import CheckpointError, ConfigError
from phalanx.telemetry import read_metrics
from phalanx.train import load_run
from phalanx.train.sessions import hooks
from phalanx.train.setup.preflight import check_inputs
from tiny_dataset import write_tiny_dataset
from tiny_run_file import tiny_run_file

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["the", "shield", "of", "each", "covers", "next", "one", "and", "line", "holds", "when", "them", "falls"]
TEXTS = {
    group: [" ".join(WORDS[(number * 7 + at * step) % len(WORDS)] for at in range(8 + number % 30)) + f" {number}"
            for number in range(60)]
    for group, step in (("web", 1), ("code", 5))
}  # fmt: skip
MIXED = (
    '[{until={samples=24},weights={web=0.75,code=0.25},curriculum={by="quality",buckets=4}},'
    "{weights={web=1.0,code=1.0}}]"
)
ALONE = "[pipeline]\nstages = 1\n[checkpoint]\nevery = 2\njournal = false\n"
SPLIT = """
[model.adapter]
rank = 2
[split]
cut = 2
clients = 2
allow_insecure_sim = true
[checkpoint]
every = 2
"""
DOMAIN = "[parallel]\ndp = 1\n[checkpoint]\nevery = 2\n"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    home = tmp_path_factory.mktemp("shards") / "made"
    write_tiny_dataset(home, TEXTS)
    return home


@pytest.fixture
def load(tmp_path, shards):
    def make(sections, *overrides, phases=MIXED):
        shape = 'sequence_length=16,packing="best_fit",max_validation_sequences=8'
        data = f'data={{dataset={{path="{shards}"}},{shape},phases={phases}}}'
        path = tmp_path / "shards.toml"
        path.write_text(tiny_run_file(sections))
        return load_run(path, [data, *overrides])

    return make


def stop_before_saving(monkeypatch, num_steps):
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == num_steps:
            raise KeyboardInterrupt
        save(self, at)

    monkeypatch.setattr(hooks.RunHooks, "save_if_due", stop)


def losses(directory):
    return [line["loss"] for line in read_metrics(directory / "metrics.jsonl")]


@pytest.mark.quick_cases("one?process")
@pytest.mark.parametrize(
    ("sections", "phases"),
    [(ALONE, MIXED), (DOMAIN, MIXED), pytest.param(SPLIT, "[]", marks=pytest.mark.slow)],
    ids=["one process", "a domain", "a split"],
)
def test_a_run_from_shards_that_stops_goes_on_as_if_it_had_not(load, quietly, tmp_path, monkeypatch, sections, phases):
    run = load(sections, "data.attention='document'", phases=phases)
    check_inputs(run)
    whole = quietly(run, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_before_saving(patch, 5)
        stopped = quietly(run, tmp_path / "stopped")
    assert stopped["status"] == "interrupted"

    resumed = quietly(run, tmp_path / "stopped", resume=True)

    assert resumed["final_weights_digest"] == whole["final_weights_digest"]
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert "not verified" in whole["shown"]


def test_phases_to_come_may_change_at_a_resume_and_those_that_are_over_may_not(load, quietly, tmp_path, monkeypatch):
    one = "[{weights={web=1.0,code=1.0}}]"
    added = "[{until={samples=40},weights={web=1.0,code=1.0}},{weights={code=1.0}}]"
    other = "[{until={samples=8},weights={web=1.0,code=1.0}},{weights={code=1.0}}]"
    with monkeypatch.context() as patch:
        stop_before_saving(patch, 5)
        quietly(load(ALONE, phases=one), tmp_path / "run")

    with pytest.raises(CheckpointError, match=r'group "code": it gave .* finished phases cannot change'):
        quietly(load(ALONE, phases=other), tmp_path / "run", resume=True)
    with pytest.raises(ConfigError, match=r"holds another run: data\.packing"):
        quietly(load(ALONE, "data.packing='concatenate'", phases=one), tmp_path / "run", resume=True)
    resumed = quietly(load(ALONE, phases=added), tmp_path / "run", resume=True)

    assert resumed["status"] == "completed"


@pytest.mark.slow
def test_the_example_trains_from_what_the_example_of_builds_builds(tmp_path):
    def phalanx(*words):
        command = [sys.executable, "-m", "phalanx", *words]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=patience_s(900.0)
        ).stdout

    phalanx("data", "build", str(ROOT / "examples" / "data_docs.toml"), "--workers", "1")

    phalanx(
        "train", str(ROOT / "examples" / "from_shards.toml"), "--run-dir", "run",
        "--set", "train.steps=10", "--set", "train.validate_every=10", "--set", "checkpoint.every=5",
        "--set", "data.max_validation_sequences=8",
    )  # fmt: skip

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["false_accusations"]) == ("completed", 10, 0)
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["audits"] > 0
