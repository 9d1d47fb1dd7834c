"""Epochs, further validation sets, an early end and the best checkpoint, with the engines beside the pipeline."""

import pytest

from phalanx.telemetry import read_metrics
from phalanx.train import PastRun, load_run
from phalanx.train.sessions import hooks
from tiny_run_file import tiny_run_file

RULES = "early_stopping = { patience = 3, min_improvement = 5.0, on = 'plain' }\n"


@pytest.fixture
def load(tmp_path):
    (tmp_path / "plain.txt").write_text("The argument is evaluated and the result is returned. " * 60)
    sets = f'validation = [{{ name = "plain", sources = [{{ kind = "text", path = "{tmp_path}/plain.txt" }}] }}]\n'

    def make(sections, *overrides):
        text = tiny_run_file(sections, validate_every=1).replace("[train]\n", f"{sets}\n[train]\n{RULES}")
        path = tmp_path / "everyday.toml"
        path.write_text(text)
        return load_run(path, overrides)

    return make


DOMAIN = "[parallel]\ndp = 1\n[checkpoint]\nevery = 2\nbest = 'plain'\n"
ALONE = "[pipeline]\nstages = 2\n[checkpoint]\nevery = 2\nbest = 'plain'\njournal = false\n"


def stop_before_saving(monkeypatch, num_steps):
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == num_steps:
            raise KeyboardInterrupt
        save(self, at)

    monkeypatch.setattr(hooks.RunHooks, "save_if_due", stop)


def test_a_domain_measures_and_ends_as_a_pipeline_does(load, quietly, tmp_path):
    domain = quietly(load(DOMAIN), tmp_path / "domain")
    alone = quietly(load(ALONE), tmp_path / "alone")

    # the first is the best, and three in a row bring no five nats
    assert domain["steps"] == alone["steps"] == 4
    for key in ("step", "on", "best_step", "validations_without_improvement"):
        assert domain["stopped_early"][key] == alone["stopped_early"][key], key
    for name, figures in domain["validation_sets"].items():
        assert figures == pytest.approx(alone["validation_sets"][name], rel=1e-5)
    assert domain["best_checkpoint"]["step"] == alone["best_checkpoint"]["step"]
    assert PastRun(tmp_path / "domain").open_verified(best=True).step == domain["best_checkpoint"]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_domain_that_was_stopped_decides_as_the_undisturbed_one(load, quietly, tmp_path, monkeypatch, dies_at):
    whole = quietly(load(DOMAIN), tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_before_saving(patch, dies_at)
        quietly(load(DOMAIN), tmp_path / "run")

    again = quietly(load(DOMAIN), tmp_path / "run", resume=True)

    for key in ("steps", "stopped_early", "best_checkpoint", "final_weights_digest", "validation_sets"):
        assert again[key] == whole[key], key


@pytest.mark.slow
def test_a_domain_is_made_longer_in_place(load, quietly, tmp_path):
    more = ("optimizer.schedule=constant", "train.early_stopping-")
    quietly(load(DOMAIN, *more, "train.steps=3"), tmp_path / "run")

    longer = quietly(load(DOMAIN, *more, "train.steps=5"), tmp_path / "run", resume=True)
    whole = quietly(load(DOMAIN, *more, "train.steps=5"), tmp_path / "whole")

    assert longer["final_weights_digest"] == whole["final_weights_digest"]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["loss"] for row in rows] == [row["loss"] for row in read_metrics(tmp_path / "whole" / "metrics.jsonl")]


def test_a_domain_counts_epochs(load, quietly, tmp_path):
    run = load(DOMAIN, "train.steps-", "train.epochs=0.02", "train.early_stopping-")

    summary = quietly(run, tmp_path / "run")

    assert f"0.02 epochs of this data are {summary['steps']} steps" in summary["shown"]
    assert load_run(tmp_path / "run" / "config.toml").train.steps == summary["steps"]
