"""Several validation sets: each by its name in metrics, summary, TensorBoard and report, beside the held-out share."""

import json
import math

import pytest

from phalanx.checkpoint.export import export_model
from phalanx.data import prepare_corpus, prepare_validation_sets, validation_batches
from phalanx.models import ModelSource, build_stage, open_model, partition_layers, tie_head
from phalanx.report import write_report
from phalanx.telemetry import read_metrics
from phalanx.train import PastRun
from phalanx.train.batches.validation import measure_perplexities, measure_perplexity


@pytest.fixture(scope="module")
def sets_file(tmp_path_factory):
    """Some sentences of their own, for the two further sets."""
    home = tmp_path_factory.mktemp("sets")
    for name, word in (("plain", "The argument is evaluated and the result is returned. "), ("odd", "zq xj kv. ")):
        (home / f"{name}.txt").write_text(word * 60)
    return home


def sets_of(home):
    names = ("plain", "odd")
    sets = [f'{{name="{name}",sources=[{{kind="text",path="{home / name}.txt"}}]}}' for name in names]
    return f"data.validation=[{','.join(sets)}]"


@pytest.fixture(scope="module")
def measured_once():
    return []


@pytest.fixture
def measured(measured_once, make_run, quietly, sets_file, tmp_path_factory):
    """Summary and directory of a run, which the first of the tests that read them trains."""
    if not measured_once:
        run_dir = tmp_path_factory.mktemp("measured") / "run"
        measured_once.append((quietly(make_run(sets_of(sets_file)), run_dir), run_dir))
    return measured_once[0]


def test_every_set_stands_by_its_name_where_the_held_out_share_does(measured, trained_once):
    summary, run_dir = measured

    found = {
        row["step"]: row["validation_sets"]
        for row in read_metrics(run_dir / "metrics.jsonl")
        if "validation_sets" in row
    }

    assert set(found) == {0, 2, 5}
    for row in found.values():
        assert list(row) == ["plain", "odd"]
        for figures in row.values():
            assert figures["loss"] == math.log(figures["perplexity"])
    last = {name: found[5][name]["perplexity"] for name in found[5]}
    assert {name: row["perplexity"] for name, row in summary["validation_sets"].items()} == last
    first = {name: row["perplexity_first"] for name, row in summary["validation_sets"].items()}
    assert first == {name: found[0][name]["perplexity"] for name in found[0]}
    # neither the training nor the held-out share knows of them
    for key in ("final_weights_digest", "validation_perplexity", "validation_perplexity_first"):
        assert summary[key] == trained_once[0][key]
    assert "plain perplexity" in summary["shown"]


def test_a_set_without_a_held_out_share_is_in_the_summary(make_run, quietly, sets_file, tmp_path):
    """As `phalanx laptop` pre-trains, whose held-out texts are a file."""
    entry = f'data.validation=[{{name="plain",sources=[{{kind="text",path="{sets_file / "plain.txt"}"}}]}}]'

    summary = quietly(make_run(entry, "data.validation_share=0.0"), tmp_path / "run")

    assert summary["validation_perplexity"] is None
    assert set(summary["validation_sets"]["plain"]) >= {"perplexity_first", "perplexity"}


def test_a_figure_in_the_summary_is_what_the_exported_model_comes_to(measured, sets_file, tmp_path):
    summary, run_dir = measured
    past = PastRun(run_dir)
    config = past.config
    cache = tmp_path / "again"
    source = open_model(config.model, cache / "models", config.train.seed)
    export_model(past.open_verified(), source, tmp_path / "model", adapter=None)
    corpus = prepare_corpus(config.data, cache / "data", config.train.seed, source.tokenizer_path)
    sets = prepare_validation_sets(config.data, corpus, cache / "data")
    model = ModelSource(tmp_path / "model")
    settings = {"adapter": None, "activation_checkpointing": False, "attention": "sdpa", "seed": 0}
    (whole,) = [build_stage(model, spec, **settings) for spec in partition_layers(model.num_layers, 1, None, 0.0, 0.0)]

    for name, one in sets.items():
        assert measure_perplexity([whole], validation_batches(one, 8)) == pytest.approx(
            summary["validation_sets"][name]["perplexity"], rel=1e-6
        )


def test_several_sets_in_one_pass_are_each_what_they_are_alone(make_run, cache, sets_file):
    run = make_run(sets_of(sets_file))
    source = open_model(run.model, cache / "models", run.train.seed)
    corpus = prepare_corpus(run.data, cache / "data", run.train.seed)
    sets = [corpus, *prepare_validation_sets(run.data, corpus, cache / "data").values()]
    settings = {"adapter": None, "activation_checkpointing": False, "attention": "sdpa", "seed": 0}
    stages = [build_stage(source, spec, **settings) for spec in partition_layers(source.num_layers, 2, None, 0.0, 0.0)]
    tie_head(stages[0], stages[-1])

    together = measure_perplexities(iter(stages), [validation_batches(one, 4) for one in sets])

    assert together == [measure_perplexity(iter(stages), validation_batches(one, 4)) for one in sets]
    assert len(set(together)) == 3


def test_one_set_may_decide_while_another_one_is_only_looked_at(make_run, quietly, sets_file, tmp_path):
    rules = ("train.early_stopping={patience=1,on='odd',min_improvement=5.0}", "checkpoint.best='plain'")

    summary = quietly(make_run(sets_of(sets_file), "train.validate_every=1", *rules), tmp_path / "run")

    # the first is taken for the best, the second is not five nats better
    assert (summary["steps"], summary["stopped_early"]["on"]) == (2, "odd")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses = {row["step"] + 1: row["validation_sets"]["plain"]["loss"] for row in rows[1:]}
    assert summary["best_checkpoint"]["on"] == "plain"
    assert summary["best_checkpoint"]["loss"] <= min(losses.values())


def test_with_nothing_held_out_further_sets_are_enough(make_run, quietly, sets_file, tmp_path):
    summary = quietly(make_run(sets_of(sets_file), "data.validation_share=0.0", "train.steps=1"), tmp_path / "run")

    assert (summary["status"], summary["validation_perplexity"]) == ("completed", None)
    assert summary["validation_sets"]["plain"]["perplexity"] > 1


def test_the_report_draws_every_set(measured):
    page = write_report(measured[1]).read_text()

    assert "plain" in page
    assert "odd" in page
    found = json.loads((measured[1] / "summary.json").read_text())["validation_sets"]["odd"]["perplexity"]
    assert f"{found:.4g}" in page
