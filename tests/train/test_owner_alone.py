"""A whole run by the owner alone: what it leaves behind, and how it goes on after it was stopped."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch

import phalanx
from phalanx.errors import AuditLogError, CheckpointError, ConfigError, NonFiniteLossError
from phalanx.pipeline.owner import verified_step
from phalanx.security.audit import AuditLog, LogHead, verify_log
from phalanx.security.crypto import load_identity
from phalanx.telemetry import read_metrics
from phalanx.train import load_run
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions import hooks


def verified(run_dir, summary):
    head = LogHead(**summary["audit_log_head"])
    return verify_log(run_dir / "events.jsonl", load_identity(run_dir / "pki" / "owner").public, head).kinds


def stop_before_saving(monkeypatch, num_steps, error):
    """Let the run end just before the checkpoint after so many steps."""
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == num_steps:
            raise error
        save(self, at)

    monkeypatch.setattr(hooks.RunHooks, "save_if_due", stop)


@pytest.fixture
def clean(trained_once, tmp_path):
    """An undisturbed run, with a copy of its directory that the test may spoil."""
    summary, directory = trained_once
    shutil.copytree(directory, tmp_path / "clean")
    return summary


def test_a_run_leaves_figures_that_agree(clean, tmp_path):
    lines = read_metrics(tmp_path / "clean" / "metrics.jsonl")

    saved = json.loads((tmp_path / "clean" / "summary.json").read_text())
    assert saved == {key: value for key, value in clean.items() if key != "shown"}
    assert clean["status"] == "completed"
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert (clean["steps"], clean["tokens"], clean["steps_lost"]) == (6, 6 * 8 * 16, 0)
    assert (clean["loss_first"], clean["loss_last"]) == (lines[0]["loss"], lines[-1]["loss"])
    assert clean["loss_last"] < clean["loss_first"]
    assert clean["resumed_from"] is None
    assert verified(tmp_path / "clean", clean)["run_completed"] == 1


def test_a_validation_stands_in_the_line_of_its_step_and_the_untouched_model_in_the_first(clean, tmp_path):
    lines = read_metrics(tmp_path / "clean" / "metrics.jsonl")

    found = {line["step"]: line["validation_perplexity"] for line in lines if line["validation_perplexity"]}

    assert set(found) == {0, 2, 5}
    assert found[0] == clean["validation_perplexity_first"]
    assert found[5] == clean["validation_perplexity"] < found[0]


def test_two_runs_in_one_process_give_the_same_bits_and_leave_torch_as_it_was(run_file, tmp_path):
    before = torch.are_deterministic_algorithms_enabled()

    first = phalanx.train(phalanx.load_run(run_file), tmp_path / "one")
    second = phalanx.train(phalanx.load_run(run_file), tmp_path / "two")

    assert first["final_weights_digest"] == second["final_weights_digest"]
    assert torch.are_deterministic_algorithms_enabled() is before


def test_an_owner_that_stood_still_in_the_middle_of_a_step_goes_on(run_file, tmp_path, monkeypatch):
    """A closed laptop, or SIGSTOP: when it goes on it looks at once what the step waits for, here all the time."""
    monkeypatch.setattr(verified_step, "LOOKS_PER_STEP", 10**12)

    one_stage = phalanx.train(load_run(run_file, ("pipeline.stages=1",)), tmp_path / "one")

    assert (one_stage["status"], one_stage["steps"]) == ("completed", 6)


def test_another_seed_gives_other_weights(make_run, quietly, clean, tmp_path):
    other = quietly(make_run("train.seed=4"), tmp_path / "other")

    assert other["final_weights_digest"] != clean["final_weights_digest"]


@pytest.mark.parametrize("num_steps", [3, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 6))])
def test_ctrl_c_leaves_a_summary_and_a_run_that_ends_with_the_same_bits(
    make_run, quietly, clean, tmp_path, monkeypatch, num_steps
):
    with monkeypatch.context() as patch:
        stop_before_saving(patch, num_steps, KeyboardInterrupt())
        stopped = quietly(make_run(), tmp_path / "run")
    resumed = quietly(make_run(), tmp_path / "run", resume=True)

    assert (stopped["status"], stopped["steps"]) == ("interrupted", num_steps)
    assert "--resume" in stopped["shown"]
    assert resumed["resumed_from"] == (num_steps - 1) // 2 * 2
    for key in ("final_weights_digest", "validation_perplexity_first", "validation_perplexity", "loss_first", "steps"):
        assert resumed[key] == clean[key]
    assert (resumed["tokens"], resumed["audits"]) == (clean["tokens"], clean["audits"])
    assert resumed["steps_lost"] == num_steps - resumed["resumed_from"]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5]
    expected = read_metrics(tmp_path / "clean" / "metrics.jsonl")
    assert [line["validation_perplexity"] for line in lines] == [line["validation_perplexity"] for line in expected]
    kinds = verified(tmp_path / "run", resumed)
    assert (kinds["run_started"], kinds["run_stopped"], kinds["run_resumed"], kinds["run_completed"]) == (1, 1, 1, 1)


def test_sigterm_ends_a_run_like_ctrl_c(make_run, quietly, tmp_path):
    def when_it_trains():
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    watcher = threading.Thread(target=when_it_trains)
    watcher.start()
    summary = quietly(make_run("train.steps=2000"), tmp_path / "run")
    watcher.join()

    assert summary["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_disk_that_takes_not_even_the_summary_still_gives_the_first_error(make_run, quietly, tmp_path, monkeypatch):
    def full(self, summary):
        raise CheckpointError("summary.json: cannot be written")

    with monkeypatch.context() as patch:
        stop_before_saving(patch, 2, OSError(28, "No space left on device", "metrics.jsonl"))
        patch.setattr(RunDirectory, "write_summary", full)
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl: No space left on device"):
            quietly(make_run(), tmp_path / "run")


def test_a_run_that_is_complete_says_so_and_changes_nothing(make_run, quietly, clean, tmp_path):
    log = (tmp_path / "clean" / "events.jsonl").read_bytes()

    again = quietly(make_run(), tmp_path / "clean", resume=True)

    assert "complete" in again.pop("shown")
    assert again == {key: value for key, value in clean.items() if key != "shown"}
    assert (tmp_path / "clean" / "events.jsonl").read_bytes() == log


def test_a_complete_run_that_lost_its_summary_gets_it_back(make_run, quietly, clean, tmp_path):
    (tmp_path / "clean" / "summary.json").unlink()

    again = quietly(make_run(), tmp_path / "clean", resume=True)

    for key in ("status", "steps", "tokens", "final_weights_digest", "validation_perplexity", "loss_last", "audits"):
        assert again[key] == clean[key]


def test_a_forged_summary_does_not_end_a_run(make_run, quietly, clean, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_before_saving(patch, 3, KeyboardInterrupt())
        quietly(make_run(), tmp_path / "run")
    forged = json.dumps({key: value for key, value in clean.items() if key != "shown"})
    (tmp_path / "run" / "summary.json").write_text(forged)

    resumed = quietly(make_run(), tmp_path / "run", resume=True)

    assert resumed["resumed_from"] == 2


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    """Where the run lies that all tests copy; the first of them trains it."""
    return tmp_path_factory.mktemp("stopped") / "run"


@pytest.fixture
def stopped(stopped_once, make_run, quietly, tmp_path, monkeypatch):
    if not stopped_once.exists():
        with monkeypatch.context() as patch:
            stop_before_saving(patch, 5, KeyboardInterrupt())
            quietly(make_run(), stopped_once)
    return shutil.copytree(stopped_once, tmp_path / "run")


def test_an_altered_checkpoint_is_refused_by_name(make_run, quietly, stopped):
    shard = stopped / "checkpoints" / "step-00000004" / "stage-1.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)

    with pytest.raises(CheckpointError, match=r"step-00000004/stage-1\.safetensors: altered"):
        quietly(make_run(), stopped, resume=True)

    assert json.loads((stopped / "summary.json").read_text())["status"] == "failed"


def test_an_older_checkpoint_in_the_place_of_the_newest_is_refused_unless_it_is_asked_for(
    make_run, quietly, stopped, clean
):
    newest = stopped / "checkpoints" / "step-00000004"
    newest.rename(stopped / "broken")

    with pytest.raises(CheckpointError, match=r"rolled back: the newest is of step 2, the audit log has one of step 4"):
        quietly(make_run(), stopped, resume=True)
    with pytest.raises(CheckpointError, match=r"step-00000003: missing; existing checkpoints: steps \[2\]"):
        quietly(make_run(), stopped, resume=True, from_step=3)
    resumed = quietly(make_run(), stopped, resume=True, from_step=2)

    assert (resumed["resumed_from"], resumed["steps"]) == (2, 6)
    assert verified(stopped, resumed)["older_accepted"] == 1
    assert resumed["final_weights_digest"] == clean["final_weights_digest"]


def test_a_changed_config_is_refused_and_nothing_touched(make_run, quietly, stopped):
    before = {path.name: path.stat().st_mtime_ns for path in stopped.iterdir()}

    with pytest.raises(ConfigError, match="holds another run"):
        quietly(make_run("train.seed=9"), stopped, resume=True)

    assert {path.name: path.stat().st_mtime_ns for path in stopped.iterdir()} == before


def test_a_broken_log_is_refused_by_line(make_run, quietly, stopped):
    log = stopped / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0].replace(b"run_started", b"run_starved"), *lines[1:]]))

    with pytest.raises(AuditLogError, match="line 1"):
        quietly(make_run(), stopped, resume=True)


def test_a_second_process_cannot_go_on_with_a_run_that_is_running(make_run, quietly, stopped):
    metrics = (stopped / "metrics.jsonl").read_bytes()
    record = json.loads((stopped / "run.json").read_text())

    with (
        AuditLog(stopped / "events.jsonl", load_identity(stopped / "pki" / "owner"), record["run"]),
        pytest.raises(AuditLogError, match="open elsewhere"),
    ):
        quietly(make_run(), stopped, resume=True)

    assert (stopped / "metrics.jsonl").read_bytes() == metrics
    assert json.loads((stopped / "summary.json").read_text())["status"] == "interrupted"


def test_a_loss_that_is_not_finite_ends_the_run_with_its_name(make_run, quietly, tmp_path):
    run = make_run("optimizer.lr=1e30", "optimizer.clip_norm=1e30")

    with pytest.raises(NonFiniteLossError, match=r"optimizer\.lr"):
        quietly(run, tmp_path / "run")

    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"


def test_a_run_can_be_told_by_its_own_config_file(quietly, clean, tmp_path):
    again = quietly(load_run(tmp_path / "clean" / "config.toml"), tmp_path / "again")

    assert again["config_digest"] == clean["config_digest"]
    assert again["final_weights_digest"] == clean["final_weights_digest"]


@pytest.mark.parametrize("layers", [1, 2])
def test_a_model_too_short_for_stages_in_other_hands_trains(make_run, quietly, tmp_path, layers):
    run = make_run("train.steps=1", "pipeline.stages=1", f"model.architecture.n_layer={layers}")

    summary = quietly(run, tmp_path / "run")

    assert (summary["status"], summary["steps"]) == ("completed", 1)
