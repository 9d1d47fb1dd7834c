"""A guarded pipeline that is killed: it ends early where the undisturbed one does, and is made longer in place."""

import pytest
from real_runs import JOURNAL, events
from test_crashes import kill_owner

from phalanx.telemetry import read_metrics
from phalanx.train import PastRun
from phalanx.train.records.proof import verify_run

# no validation is five nats better than the first: the sixth is the fifth in a row that brings nothing
RULES = (
    "train.validate_every=1",
    "train.early_stopping={patience=5,min_improvement=5.0}",
    "checkpoint.best='validation'",
)
CONSTANT = "optimizer.schedule=constant"


@pytest.mark.slow
@pytest.mark.parametrize("journal", ["checkpoint.journal=false", JOURNAL])
def test_a_killed_pipeline_ends_early_where_the_undisturbed_one_does(place, journal):
    expected = place.finish(*RULES, journal, run_dir="whole")
    process = place.train(*RULES, journal)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 3,'))
    kill_owner(place, process)

    summary = place.finish(*RULES, journal, resume=True)

    for key in ("steps", "stopped_early", "best_checkpoint", "final_weights_digest", "validation_perplexity"):
        assert summary[key] == expected[key], key
    assert summary["stopped_early"]["step"] == summary["steps"] == 6
    assert [kind for kind, _ in events(place, "stopped_early", "run_completed")] == ["stopped_early", "run_completed"]
    assert PastRun(place.path / "run").open_verified(best=True).step == summary["best_checkpoint"]["step"]
    proof = verify_run(place.path / "run")
    assert (proof.steps, proof.proven, proof.unproven) == (6, 6, ())


@pytest.mark.slow
def test_a_killed_pipeline_is_made_longer_in_place_with_the_bits_of_one_that_was_to_be_so_long(place):
    whole = place.finish(CONSTANT, "train.steps=10", run_dir="whole")
    process = place.train(CONSTANT)
    place.wait_for(process, lambda: place.has_line("metrics.jsonl", '"step": 4,'))
    kill_owner(place, process)

    summary = place.finish(CONSTANT, "train.steps=10", resume=True)

    assert (summary["status"], summary["steps"], summary["resumed_from"]) == ("completed", 10, 3)
    assert summary["final_weights_digest"] == whole["final_weights_digest"]
    mine, theirs = (read_metrics(place.path / name / "metrics.jsonl") for name in ("run", "whole"))
    assert [row["loss"] for row in mine] == [row["loss"] for row in theirs]
    proof = verify_run(place.path / "run")
    assert (proof.steps, proof.proven, proof.unproven) == (10, 10, ())
