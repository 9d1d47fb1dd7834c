"""The learning-rate finder: what a rising rate shows, and that no other run is touched."""

import io
import math
import xml.etree.ElementTree as ElementTree

import pytest
from rich.console import Console

from phalanx.errors import ConfigError, InputError
from phalanx.optimizers import learning_rate
from phalanx.report import write_rate_svg
from phalanx.train import find_rate
from phalanx.train.rate_finder import advice_of, make_rising_run


def rows(losses, highest=1.0):
    return [{"step": step, "lr": highest * (step + 1) / len(losses), "loss": loss} for step, loss in enumerate(losses)]


def test_the_rate_rises_linearly_up_to_the_highest_one_and_nothing_is_validated_or_saved(make_run):
    rules = ("train.early_stopping={patience=1}", "train.stability={action='roll_back'}")
    run = make_run("train.validate_every=1", *rules, "checkpoint.best='validation'", "checkpoint.every=2")

    short = make_rising_run(run, 0.5, 20)

    rates = [learning_rate(short.optimizer, step, short.train.steps) for step in range(20)]
    assert rates == pytest.approx([0.5 * (step + 1) / 20 for step in range(20)])
    assert (short.train.validate_every, short.train.early_stopping, short.checkpoint.best) == (0, None, None)
    # a rate that is too high makes losses rise, which the rule would hide
    assert short.train.stability is None
    # everything that a loss depends on is the run's
    assert (short.model, short.data, short.train.batch_size) == (run.model, run.data, run.train.batch_size)


def test_weights_of_a_run_with_encrypted_checkpoints_are_encrypted_in_the_finder_too(make_run):
    run = make_run("checkpoint.encrypt=true", "checkpoint.key='env:KEY'", "checkpoint.journal=false")

    assert make_rising_run(run, 0.5, 20).checkpoint.key == "env:KEY"


def test_the_suggestion_lies_below_the_rate_with_the_lowest_smoothed_loss():
    losses = [10.0 - 0.2 * step for step in range(30)] + [4.0 + 0.8 * step for step in range(30)]

    advice = advice_of(rows(losses))

    assert advice.has_end
    assert 0.45 < advice.lowest_at < 0.65
    assert advice.suggested == advice.lowest_at / 3
    assert f"start with optimizer.lr = {advice.suggested:.2g}" in advice.describe_advice()


def test_a_loss_that_falls_to_the_end_asks_for_a_higher_rate():
    advice = advice_of(rows([10.0 - 0.1 * step for step in range(50)]))

    assert not advice.has_end
    assert "try a larger --to" in advice.describe_advice()


@pytest.mark.parametrize("broken", [math.nan, math.inf, None])
def test_what_comes_after_a_loss_that_is_no_number_is_not_looked_at(broken):
    advice = advice_of(rows([5.0, 4.0, 3.0, broken, 0.1, 0.1]))

    assert len(advice.readings) == 4
    assert advice.has_end
    assert advice.lowest_at == 0.5


def test_without_a_finite_loss_nothing_is_suggested(tmp_path):
    advice = advice_of(rows([math.nan]), broke_off=True)

    assert (advice.suggested, advice.lowest_at) == (None, None)
    assert "no learning rate to suggest" in advice.describe_advice()
    with pytest.raises(InputError, match="no finite loss"):
        write_rate_svg([(0.1, None, None)], None, tmp_path / "lr.svg")


def test_the_losses_are_those_of_the_engine_and_every_other_directory_stays_as_it_is(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "config.toml").write_text("a run that trains")

    advice = find_rate(make_run(), 0.3, 12, Console(file=io.StringIO()))

    assert [one.lr for one in advice.readings[:12]] == pytest.approx([0.3 * (step + 1) / 12 for step in range(12)])
    assert all(one.loss is not None for one in advice.readings)
    assert advice.suggested is not None
    assert (tmp_path / "runs" / "tiny" / "config.toml").read_text() == "a run that trains"
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["tiny"]


def test_prepared_text_is_shared_with_the_runs_and_the_steps_directory_is_removed(make_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PHALANX_CACHE")

    find_rate(make_run(), 0.3, 10, Console(file=io.StringIO()))

    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [".cache"]


def test_remote_workers_are_not_kept_waiting(make_run):
    run = make_run("pipeline.stages=4", "pipeline.remote_workers=['east','west']", "pipeline.pki='pki'")

    with pytest.raises(ConfigError, match="use local workers"):
        find_rate(run, None, 10, Console(file=io.StringIO()))


def test_the_picture_is_a_file_of_its_own_with_both_curves(tmp_path):
    advice = advice_of(rows([10.0 - 0.2 * step for step in range(30)] + [4.0 + 0.8 * step for step in range(30)]))
    rates = [(one.lr, one.loss, one.smoothed) for one in advice.readings]

    path = write_rate_svg(rates, advice.suggested, tmp_path / "lr.svg")

    drawn = ElementTree.fromstring(path.read_text())
    assert drawn.tag.endswith("svg")
    text = path.read_text()
    assert "learning rate" in text
    assert f"suggested {advice.suggested:.2g}" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
