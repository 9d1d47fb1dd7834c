"""Figures of a run: counted from what happened, null where nothing was measured."""

import json
import math

import pytest
import torch

from phalanx.config import canonical_json
from phalanx.data import IGNORE, Batch
from phalanx.engine import GuardReport, StepResult
from phalanx.errors import CheckpointError
from phalanx.models import ModelConfig, build_stage, open_model, partition_layers, tie_head
from phalanx.pipeline import GuardConfig, StageChecks
from phalanx.train import load_run
from phalanx.train.batches.preferences import PreferenceScores
from phalanx.train.batches.scores import Scores
from phalanx.train.batches.validation import measure_perplexity
from phalanx.train.records.check_record import CheckRecord
from phalanx.train.records.record import GroundTruth, RunningTotals
from phalanx.train.records.summary import Figures, summarise_run
from tiny_run_file import tiny_run_file

PLAIN = {"adapter": None, "activation_checkpointing": False, "attention": "sdpa", "seed": 0}


def result(step, loss=2.0, audits=3, alarms=0):
    return StepResult(
        step=step,
        loss=loss,
        num_targets=10,
        gradient_norm=1.0,
        phases={},
        bytes_by_link={},
        batch="",
        guard=GuardReport(num_audits=audits, num_alarms=alarms),
    )


def verdict(party, step):
    return {"party": party, "stage": 1, "step": step, "offence": "message", "reason": "wrong", "more": 1}


def test_totals_survive_a_checkpoint():
    totals, other = RunningTotals(), RunningTotals()
    totals.count_step(result(0, loss=5.0), 128, 0.5)
    totals.count_step(result(1, loss=4.0), 128, 0.5)

    other.load_json(json.loads(json.dumps(vars(totals))))

    assert other == totals
    assert (other.steps, other.last_step, other.tokens, other.audits) == (2, 1, 256, 6)
    assert (other.loss_first, other.loss_last, other.wall_s) == (5.0, 4.0, 1.0)


@pytest.mark.parametrize("saved", [{}, {"steps": 1}, {**vars(RunningTotals()), "surprise": 1}])
def test_totals_of_another_version_are_refused(saved):
    with pytest.raises(CheckpointError, match="totals"):
        RunningTotals().load_json(saved)


def test_figures_of_another_version_are_refused():
    with pytest.raises(CheckpointError, match="figures"):
        Figures().load_json({"validation_first": 1.0})
    with pytest.raises(CheckpointError, match="figures"):
        Figures().load_json({"validation_first": 1.0, "validation_last": 1.0})


@pytest.mark.parametrize(
    ("guard", "preset"),
    [
        ({}, "standard"),
        ({"preset": "light"}, "light"),
        ({"audit_rate": 0.125}, None),
        ({"mode": "off"}, None),
    ],
)
def test_the_summary_says_which_preset_is_in_force(make_run, tmp_path, guard, preset):
    run = make_run().model_copy(update={"guard": GuardConfig(**guard)})

    summary = summarise_run(run, Figures(), RunningTotals(), GroundTruth(tmp_path / "attack.jsonl"))

    assert (summary["guard"], summary["preset"]) == (guard.get("mode", "phalanx"), preset)


def test_an_infinite_perplexity_is_saved_as_null():
    assert Figures(validation_first=math.inf, validation_last=9.0).to_json() == {
        "validation_first": None,
        "validation_last": 9.0,
        "checks": CheckRecord().to_json(),
    }


@pytest.mark.parametrize("scores", [Scores(math.nan, 0.5, 0.25), PreferenceScores(math.inf, 0.5, math.nan, None)])
def test_scores_that_are_no_numbers_are_saved_as_null_and_come_back(scores):
    figures, again = Figures(scores_last=scores, named_last={"more": scores}), Figures()
    if isinstance(scores, Scores):
        figures.named_last = {}

    again.load_json(json.loads(canonical_json(figures.to_json())))

    assert again.scores_last.loss == math.inf
    assert again.scores_last.accuracy == 0.5
    assert type(again.scores_last) is type(scores)
    assert again.named_last.keys() == figures.named_last.keys()


def test_a_summary_counts_detections_and_false_accusations_against_the_truth(make_run, tmp_path):
    truth = GroundTruth(tmp_path / "attack.jsonl")
    truth.attacked |= {("worker-1", 4), ("worker-1", 6)}
    figures = Figures(status="completed")
    for body in (verdict("worker-1", 4), verdict("worker-2", 5)):
        figures.observe("verdict", body)
        figures.observe("evicted", {"party": body["party"]})
    figures.observe("takeover", {"stage": 1})
    figures.observe("lost", {"party": "worker-3"})

    summary = summarise_run(make_run(), figures, RunningTotals(), truth)

    assert (summary["attacks_injected"], summary["attacked_steps"]) == (2, [4, 6])
    assert (summary["detections"], summary["false_accusations"]) == (1, 1)
    assert (summary["evicted"], summary["lost"], summary["takeovers"]) == (["worker-1", "worker-2"], ["worker-3"], 1)
    assert "more" not in summary["verdicts"][0]


def test_with_remote_workers_what_the_owner_found_is_counted_and_what_they_alone_know_is_null(make_run, tmp_path):
    figures = Figures(status="completed")
    for body in (verdict("east", 4), verdict("east", 4), verdict("west", 5)):
        figures.observe("verdict", body)
        figures.observe("evicted", {"party": body["party"]})

    remote = make_run("pipeline.stages=4", "pipeline.remote_workers=['east','west']", "pipeline.pki='pki'")
    summary = summarise_run(remote, figures, RunningTotals(), GroundTruth(tmp_path / "attack.jsonl"))

    # one a party and step
    assert (summary["detections"], summary["audits"], summary["evicted"]) == (2, 0, ["east", "east", "west"])
    assert [summary[key] for key in ("attacks_injected", "attacked_steps", "false_accusations")] == [None] * 3


def test_a_summary_counts_refused_verdicts_and_parties_that_were_given_up(make_run, tmp_path):
    """A run that lost all its workers to a liar that cannot be convicted must not look as if nothing had happened."""
    figures = Figures(status="failed")
    for step in range(6):
        figures.observe("verdict_refused", {"party": "worker-2", "step": step, "why": "spoilt"})
    figures.observe("replaced", {"party": "worker-1", "step": 5, "cause": "refused", "reason": "twice not borne out"})

    summary = summarise_run(make_run(), figures, RunningTotals(), GroundTruth(tmp_path / "attack.jsonl"))

    assert (summary["verdicts"], summary["verdicts_refused"]) == ([], 6)
    assert summary["replaced"] == [{"party": "worker-1", "step": 5, "cause": "refused"}]


def test_a_summary_says_which_steps_are_in_doubt(make_run, tmp_path):
    figures = Figures(status="completed", checkpoints=(0, 2))
    for step in range(4):
        figures.checks.note_applied(step, {1: StageChecks(frozenset({"messages"}), "worker-1", None)})
    figures.observe("verdict", verdict("worker-1", 4))
    figures.observe("drift", {"stage": 1, "party": "worker-1", "direction": "forward", "step": 3, "bias_sigmas": 6.0})

    again = Figures()
    again.load_json(json.loads(json.dumps(figures.to_json())))
    summary = summarise_run(make_run(), figures, RunningTotals(), GroundTruth(tmp_path / "attack.jsonl"))

    (doubt,) = summary["steps_in_doubt"]
    assert (doubt["party"], doubt["stage"], doubt["steps"], doubt["convicted_in"]) == ("worker-1", 1, [[0, 3]], [4])
    assert (summary["status"], summary["in_doubt"], summary["checkpoint_before_doubt"]) == ("completed", True, 0)
    assert summary["steps_believed"] == {"1": 4}
    assert summary["checks"]["1"]["messages"] == {"steps": 4, "last": 3}
    assert [row["party"] for row in summary["drifts"]] == ["worker-1"]
    assert again.checks.list_doubts() == figures.checks.list_doubts()


def test_a_run_without_stages_in_other_hands_has_no_such_figures(make_run, tmp_path):
    path = tmp_path / "domain.toml"
    path.write_text(tiny_run_file("[parallel]\ndp = 2\n"))

    summary = summarise_run(load_run(path), Figures(), RunningTotals(), GroundTruth(tmp_path / "attack.jsonl"))

    assert {"in_doubt", "steps_in_doubt", "steps_believed", "checks"}.isdisjoint(summary)
    assert (summary["guard"], summary["preset"]) == ("off", None)


def test_what_was_not_measured_is_null(make_run, tmp_path):
    truth = GroundTruth(tmp_path / "attack.jsonl")

    summary = summarise_run(make_run(), Figures(), RunningTotals(), truth)

    for key in ("loss_first", "loss_last", "validation_perplexity", "tokens_per_s", "final_weights_digest"):
        assert summary[key] is None
    assert (summary["status"], summary["steps"], summary["steps_lost"], summary["attacks_injected"]) == (
        "failed",
        0,
        0,
        0,
    )
    assert json.loads(json.dumps(summary, allow_nan=False)) == json.loads(json.dumps(summary))


def test_a_step_that_was_left_out_is_counted_as_lost(make_run, tmp_path):
    totals = RunningTotals()
    totals.count_step(result(0), 128, 0.5)
    totals.count_step(result(2), 128, 0.5)

    summary = summarise_run(make_run(), Figures(), totals, GroundTruth(tmp_path / "attack.jsonl"))

    assert summary["steps_lost"] == 1


def test_nobody_knows_the_truth_about_remote_workers(make_run, tmp_path):
    run = make_run("pipeline.stages=3", "pipeline.remote_workers=['far']", "pipeline.pki='keys'")

    summary = summarise_run(run, Figures(), RunningTotals(), GroundTruth(tmp_path / "attack.jsonl"))

    for key in ("attacks_injected", "attacked_steps", "false_accusations"):
        assert summary[key] is None


def test_the_truth_grows_line_by_line_and_half_a_line_waits(tmp_path):
    path = tmp_path / "attack.jsonl"
    truth = GroundTruth(path)
    truth.read_new_lies()
    lines = [json.dumps({"party": "worker-1", "step": step, "microbatch": 0}) + "\n" for step in (3, 3, 5)]
    path.write_text(lines[0] + lines[1] + lines[2][:9])

    truth.read_new_lies()
    early = truth.attacked_steps()
    path.write_text("".join(lines))
    truth.read_new_lies()

    assert (early, truth.attacked_steps()) == ({3}, {3, 5})


def test_perplexity_of_a_chain_is_that_of_the_whole_batch(tmp_path):
    architecture = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 8}
    source = open_model(ModelConfig(from_scratch=True, architecture=architecture), tmp_path, seed=1)
    stages = [build_stage(source, spec, **PLAIN) for spec in partition_layers(2, 2, None, 0.0, 0.0)]
    tie_head(stages[0], stages[-1])
    ids = torch.arange(48).reshape(6, 8) % 40
    labels = (ids + 1) % 40
    labels[0, 3:] = IGNORE
    batches = [Batch(ids[:4], labels[:4], (0, 1, 2, 3)), Batch(ids[4:], labels[4:], (4, 5))]

    found = measure_perplexity(iter(stages), batches)

    with torch.no_grad():
        for stage in stages:
            stage.eval()
        logits = stages[1](stages[0](ids))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    assert found == pytest.approx(math.exp(float(loss)), rel=1e-5)


def test_perplexity_without_targets_or_beyond_all_numbers_is_infinite(tmp_path):
    architecture = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 8}
    source = open_model(ModelConfig(from_scratch=True, architecture=architecture), tmp_path, seed=1)
    stage = build_stage(source, partition_layers(1, 1, None, 0.0, 0.0)[0], **PLAIN)
    ids = torch.zeros(1, 8, dtype=torch.long)
    nothing = Batch(ids, torch.full_like(ids, IGNORE), (0,))
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(1e4)
    wrong = Batch(ids, ids + 7, (0,))

    assert measure_perplexity([stage], [nothing]) == math.inf
    assert measure_perplexity([stage], [wrong]) == math.inf
