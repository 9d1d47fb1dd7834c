"""A run meets batches with a loss that is not a number: it goes on with the next ones, counts, and ends after many."""

import contextlib
import json
from dataclasses import replace

import pytest
import torch

from phalanx.data import BatchLoader
from phalanx.errors import NonFiniteLossError
from phalanx.security.audit import verify_log
from phalanx.security.crypto import load_identity
from phalanx.telemetry import read_metrics
from phalanx.train import loop
from phalanx.train.sessions import hooks


@contextlib.contextmanager
def failing(*places):
    """Let the batches that are drawn at these places fail, whenever they are drawn again."""
    honest, seen, bad = loop.step_inputs, [], []

    def inputs(batch, num_microbatches, objective):
        if len(seen) in places:
            bad.append(batch.input_ids)
        seen.append(batch.input_ids)
        found = honest(batch, num_microbatches, objective)
        failed = any(torch.equal(batch.input_ids, ids) for ids in bad)
        # the mean of nothing is not a number
        return replace(found, num_targets=0) if failed else found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "step_inputs", inputs)
        yield


def leave_out(monkeypatch, place):
    """A loader that never gives the batch at this place."""
    given, honest = [], BatchLoader.next_batch

    def give(self):
        if len(given) == place:
            given.append(honest(self))
        given.append(honest(self))
        return given[-1]

    monkeypatch.setattr(BatchLoader, "next_batch", give)


def test_a_batch_that_fails_is_given_up_and_counted(make_run, quietly, tmp_path):
    with failing(2):
        summary = quietly(make_run(), tmp_path / "run")

    assert (summary["status"], summary["steps"], summary["batches_skipped"]) == ("completed", 6, 1)
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    log = verify_log(tmp_path / "run" / "events.jsonl", load_identity(tmp_path / "run" / "pki" / "owner").public)
    assert log.kinds["batch_skipped"] == 1


def test_what_is_learnt_is_what_the_other_batches_teach(make_run, quietly, tmp_path, monkeypatch):
    with failing(2):
        summary = quietly(make_run(), tmp_path / "run")
    leave_out(monkeypatch, 2)

    other = quietly(make_run(), tmp_path / "other")

    assert other["batches_skipped"] == 0
    assert summary["final_weights_digest"] == other["final_weights_digest"]


def test_too_many_in_a_row_end_the_run_which_can_be_resumed(make_run, quietly, tmp_path):
    with failing(3, 4), pytest.raises(NonFiniteLossError, match=r"step 3: loss nan.*optimizer\.lr"):
        quietly(make_run("train.max_failed_batches=1"), tmp_path / "run")
    stopped = json.loads((tmp_path / "run" / "summary.json").read_text())

    summary = quietly(make_run("train.max_failed_batches=1"), tmp_path / "run", resume=True)

    assert (stopped["status"], stopped["batches_skipped"]) == ("failed", 1)
    assert (summary["status"], summary["steps"]) == ("completed", 6)


def test_two_that_are_not_in_a_row_do_not(make_run, quietly, tmp_path):
    with failing(1, 3):
        summary = quietly(make_run("train.max_failed_batches=1"), tmp_path / "run")

    assert (summary["status"], summary["batches_skipped"]) == ("completed", 2)


@pytest.mark.slow
def test_a_resumed_run_meets_the_same_batches_and_counts_each_once(make_run, quietly, tmp_path, monkeypatch):
    with failing(1, 4):
        undisturbed = quietly(make_run(), tmp_path / "undisturbed")
    save, stops = hooks.RunHooks.save_if_due, []

    def stop(self, num_steps):
        if num_steps == 5 and not stops:
            stops.append(num_steps)
            raise KeyboardInterrupt
        save(self, num_steps)

    monkeypatch.setattr(hooks.RunHooks, "save_if_due", stop)
    with failing(1, 4):
        interrupted = quietly(make_run(), tmp_path / "run")
        resumed = quietly(make_run(), tmp_path / "run", resume=True)

    assert (interrupted["status"], interrupted["batches_skipped"]) == ("interrupted", 2)
    assert resumed["resumed_from"] < 5
    assert (resumed["status"], resumed["batches_skipped"]) == ("completed", 2)
    assert resumed["final_weights_digest"] == undisturbed["final_weights_digest"]
