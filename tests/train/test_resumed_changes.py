"""What a resumed run may change of its run file: its length, its validations, its checkpoints, and nothing else."""

import io
import json
import re
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from rich.console import Console

from phalanx.config import digest_config
from phalanx.errors import CheckpointError, ConfigError, TrainingError
from phalanx.optimizers import learning_rate
from phalanx.telemetry import read_metrics
from phalanx.train import PastRun, load_run
from phalanx.train.records import run_changes
from phalanx.train.records.proof import verify_run
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.session import Session

CONSTANT = "optimizer.schedule=constant"


def events(run_dir, kind):
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [line["body"] for line in lines if line["kind"] == kind]


@pytest.fixture
def session_of(make_run, tmp_path):
    def build(engine, *overrides, resume=False):
        run = make_run(*overrides)
        home = RunDirectory(tmp_path / "run", run, resume=resume)
        text = io.StringIO()
        summary = Session(run, home, Console(file=text, width=200), engine).run_session(resume=resume)
        return {**summary, "shown": text.getvalue()}

    return build


def test_a_run_that_is_made_longer_in_place_has_the_bits_of_one_that_was_to_be_so_long(make_run, quietly, tmp_path):
    quietly(make_run(CONSTANT), tmp_path / "run")
    longer = quietly(make_run(CONSTANT, "train.steps=8"), tmp_path / "run", resume=True)
    whole = quietly(make_run(CONSTANT, "train.steps=8"), tmp_path / "whole")

    assert longer["final_weights_digest"] == whole["final_weights_digest"]
    assert (longer["steps"], longer["resumed_from"], longer["status"]) == (8, 6, "completed")
    mine, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    for key in ("step", "loss", "batch", "lr", "grad_norm"):
        assert [row[key] for row in mine] == [row[key] for row in theirs]
    # the directory speaks of the longer run, and its checkpoints of both
    assert load_run(tmp_path / "run" / "config.toml").train.steps == 8
    past = PastRun(tmp_path / "run")
    assert [past.open_verified(step).step for step in (6, 8)] == [6, 8]
    assert verify_run(tmp_path / "run").steps == 8


def test_the_new_schedule_is_told_on_the_terminal_and_in_the_signed_log(make_run, quietly, tmp_path):
    quietly(make_run(), tmp_path / "run")

    longer = quietly(make_run("train.steps=12"), tmp_path / "run", resume=True)

    optimizer = make_run().optimizer
    was, now = (learning_rate(optimizer, 6, steps) for steps in (6, 12))
    (told,) = events(tmp_path / "run", "config_changed")
    assert told == {
        "from": digest_config(make_run()),
        "to": digest_config(make_run("train.steps=12")),
        "keys": {"train.steps": [6, 12]},
        "step": 6,
        "learning_rate": [was, now],
    }
    assert "train.steps: 6 -> 12; Steps before 6 stay unchanged." in longer["shown"]
    assert f"schedule of 12 steps: {now:.3g}, where the old length had {was:.3g}" in longer["shown"]
    rates = [row["lr"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rates == [learning_rate(optimizer, step, 6 if step < 6 else 12) for step in range(12)]


@pytest.mark.parametrize("dies_at", [1, 3, 5])
def test_a_run_that_died_is_made_longer_from_where_it_goes_on(session_of, tmp_path, dies_at):
    with pytest.raises(TrainingError):
        session_of(FakeEngine({dies_at: TrainingError("on purpose")}))

    engine = FakeEngine()
    summary = session_of(engine, "train.steps=9", resume=True)

    start = dies_at // 2 * 2
    assert [step for step, _ in engine.seen] == list(range(start, 9))
    assert summary["steps"] == 9
    assert events(tmp_path / "run", "config_changed")[0]["step"] == start


def test_a_longer_run_is_resumed_with_its_new_length_alone(session_of, tmp_path):
    session_of(FakeEngine())
    with pytest.raises(TrainingError):
        session_of(FakeEngine({7: TrainingError("on purpose")}), "train.steps=9", resume=True)

    with pytest.raises(ConfigError, match=r"train\.steps: found 6, expected 9 or more"):
        session_of(FakeEngine(), resume=True)
    summary = session_of(FakeEngine(), "train.steps=9", resume=True)

    assert (summary["steps"], len(events(tmp_path / "run", "config_changed"))) == (9, 1)


@pytest.mark.parametrize("written", ["nothing", "config"])
@pytest.mark.parametrize("resumed_with", ["old", "new"])
def test_a_crash_while_the_change_is_written_leaves_a_run_that_goes_on(
    session_of, tmp_path, monkeypatch, written, resumed_with
):
    session_of(FakeEngine())

    def crash(self):
        if written == "config":
            self._write_config()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "keep_changes", crash)
        session_of(FakeEngine(), "train.steps=8", resume=True)
    steps = {"old": 6, "new": 8}[resumed_with]

    summary = session_of(FakeEngine(), f"train.steps={steps}", resume=True)

    assert (summary["status"], summary["steps"]) == ("completed", steps)
    assert load_run(tmp_path / "run" / "config.toml").train.steps == steps
    assert PastRun(tmp_path / "run").open_verified().step == steps


@pytest.mark.parametrize(
    "override",
    [
        "train.validate_every=1",
        "checkpoint.every=1",
        "checkpoint.keep=5",
        "checkpoint.keep_every=2",
        "checkpoint.best='validation'",
        "checkpoint.asynchronous=true",
        "train.early_stopping={patience=2}",
    ],
)
def test_every_key_of_the_table_may_change(session_of, tmp_path, override):
    with pytest.raises(TrainingError):
        session_of(FakeEngine({3: TrainingError("on purpose")}))

    summary = session_of(FakeEngine(perplexities={n: 30.0 - n for n in range(9)}), override, resume=True)

    assert summary["status"] == "completed"
    key = override.partition("=")[0]
    (told,) = events(tmp_path / "run", "config_changed")
    assert all(name == key or name.startswith(f"{key}.") for name in told["keys"])
    assert "learning_rate" not in told
    assert key in run_changes.CHANGEABLE


def test_a_run_that_ended_early_goes_on_when_its_rule_is_taken_out(session_of):
    curve = {n: 20.0 + n for n in range(9)}
    rule = "train.early_stopping={patience=1}"
    first = session_of(FakeEngine(perplexities=curve), "train.validate_every=1", rule)

    again = session_of(FakeEngine(perplexities=curve), "train.validate_every=1", resume=True)

    assert (first["steps"], again["steps"]) == (2, 6)


@pytest.mark.parametrize(
    "override",
    [
        "train.seed=4",
        "train.batch_size=16",
        "optimizer.lr=0.1",
        "data.sequence_length=8",
        "model.architecture.n_embd=64",
        "guard.audit_rate=0.5",
        "pipeline.schedule='gpipe'",
        "checkpoint.journal=true",
    ],
)
def test_anything_else_is_refused_by_name_with_both_values_and_the_way_out(session_of, tmp_path, override):
    session_of(FakeEngine())

    with pytest.raises(ConfigError) as refusal:
        session_of(FakeEngine(), override, "train.steps=9", resume=True)

    said = str(refusal.value)
    key = override.partition("=")[0]
    assert f"holds another run: {key} (" in said
    assert "--resume may change only train.steps, train.validate_every" in said
    assert f"--from {tmp_path / 'run'} with another --run-dir" in said
    # nothing was touched
    assert events(tmp_path / "run", "config_changed") == []


def test_what_decides_a_weight_is_in_no_line_of_the_table():
    # a key that is added here must be shown to change no step that is done
    assert {name.partition(".")[0] for name in run_changes.CHANGEABLE} <= {
        "train",
        "checkpoint",
        "evaluate",
        "tracking",
        "data",
        "rewards",
    }
    assert {name for name in run_changes.CHANGEABLE if name.startswith("rewards.")} == {"rewards.timeout_s"}
    # what the loader of a resumed run compares with what was drawn: tests/data/test_phased_batches.py
    of_data = {name for name in run_changes.CHANGEABLE if name.startswith("data.")}
    assert of_data == {"data.phases", "data.repeats", "data.skip", "data.dataset"}
    never = {"train.seed", "train.batch_size", "train.microbatches", "train.precision", "train.objective"}
    assert never.isdisjoint(run_changes.CHANGEABLE)


def test_the_table_is_the_one_of_the_docs():
    page = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"

    rows = re.findall(
        r"^\| `([a-z_.]+)` \| (.+) \|$", page.read_text().partition("may change | because")[2], re.MULTILINE
    )

    assert dict(rows[: len(run_changes.CHANGEABLE)]) == dict(run_changes.CHANGEABLE)


def test_a_run_of_an_enclave_changes_nothing(make_run, tmp_path):
    path = tmp_path / "split.toml"
    path.write_text("""
[model]
name = "smollm2-135m"
layers = 6
[model.adapter]
rank = 4
[data]
sources = [{ kind = "python_manual" }]
tokenizer = { kind = "model" }
sequence_length = 16
[train]
steps = 4
batch_size = 8
microbatches = 4
[optimizer]
lr = 1e-3
[split]
cut = 2
clients = 2
tier = "sim"
allow_insecure_sim = true
""")

    with pytest.raises(ConfigError, match="sealed states are bound to every key"):
        run_changes.changes_between(load_run(path), load_run(path, ["train.steps=9"]), "runs/x")


def test_a_config_that_no_session_had_opens_no_checkpoint(session_of, tmp_path):
    session_of(FakeEngine())
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("steps = 6", "steps = 60"))

    with pytest.raises(CheckpointError, match=r"config\.toml: has config digest .*which no session of the run had"):
        PastRun(tmp_path / "run").open_verified()
