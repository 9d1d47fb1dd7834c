"""The length of a run in passes over its data."""

import math

import pytest
from rich.console import Console

from phalanx.errors import ConfigError
from phalanx.train import describe_run, load_run
from phalanx.train.batches.epochs import num_sequences, settle_steps
from phalanx.train.records.run_directory import cache_beside


@pytest.fixture
def by_epochs(run_file):
    def make(epochs, *overrides):
        return load_run(run_file, ["train.steps-", f"train.epochs={epochs}", *overrides])

    return make


@pytest.mark.parametrize("epochs", ["1", "2", "0.5", "0.1", "3.3"])
def test_epochs_come_to_the_steps_that_draw_as_many_sequences(by_epochs, cache, tmp_path, epochs):
    run = by_epochs(epochs)

    settled = settle_steps(run, cache_beside(tmp_path / "run"))

    have = num_sequences(run, cache)
    assert have > 8
    needed = float(epochs) * have
    assert settled.train.epochs is None
    assert needed <= settled.train.steps * 8 < needed + 8 + 1e-6
    assert settled.name == run.name


def test_a_decimal_share_is_taken_as_it_is_written(by_epochs, cache):
    # 0.1 * 3 is more than 0.3 in binary
    run = by_epochs("0.1")
    sequences = num_sequences(run, cache)

    assert settle_steps(run, cache).train.steps == math.ceil(sequences / 80)


@pytest.mark.slow
def test_a_run_by_epochs_is_the_run_by_the_steps_that_they_come_to(by_epochs, make_run, quietly, tmp_path):
    steps = settle_steps(by_epochs("0.3"), cache_beside(tmp_path / "run")).train.steps

    summary = quietly(by_epochs("0.3"), tmp_path / "epochs")

    assert f"0.3 epochs of this data are {steps} steps" in summary["shown"]
    assert summary["steps"] == steps
    # the run directory knows steps alone, so that a resumed run, and every rank, has as many
    there = load_run(tmp_path / "epochs" / "config.toml")
    assert (there.train.steps, there.train.epochs) == (steps, None)
    again = quietly(by_epochs("0.3"), tmp_path / "epochs", resume=True)
    assert "is complete" in again["shown"]


def test_the_dry_run_says_how_many_steps_there_are(by_epochs, tmp_path):
    console = Console(record=True, width=200)

    console.print(describe_run(by_epochs("0.3"), tmp_path / "run"))

    shown = console.export_text()
    steps = settle_steps(by_epochs("0.3"), cache_beside(tmp_path / "run")).train.steps
    assert f"0.3 epochs of this data are {steps} steps" in shown
    assert f"steps = {steps}" in shown


def test_the_dry_run_counts_what_each_phase_draws_from_how_many_sequences(make_run, cache, tmp_path):
    run = make_run("data.phases=[{until={steps=2},amount=0.25},{}]", "train.steps=6")
    console = Console(record=True, width=200)

    console.print(describe_run(run, tmp_path / "run"))

    shown, have = console.export_text(), num_sequences(run, cache)
    few = math.ceil(have / 4)
    assert f"phase 0: 16 samples from {few:,} sequences (0.25 of them), so {16 / few:.3g} epochs" in shown
    assert f"phase 1: 32 samples from {have:,} sequences (1 of them), so {32 / have:.3g} epochs" in shown


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["train.epochs=2"], "expected train.steps or train.epochs, found both"),
        (["train.steps-"], "expected train.steps or train.epochs, found neither"),
        (["train.steps-", "train.epochs=0"], "train.epochs"),
        (["train.steps-", "train.epochs=-1"], "train.epochs"),
    ],
)
def test_a_run_has_one_length(make_run, overrides, said):
    with pytest.raises(ConfigError, match=said):
        make_run(*overrides)


def test_a_warm_up_that_leaves_nothing_is_refused_when_the_steps_are_known(by_epochs, cache):
    run = by_epochs("0.3", "optimizer.warmup_steps=100000")

    with pytest.raises(ConfigError, match=r"train.epochs = 0.3 is train.steps = .*warmup_steps"):
        settle_steps(run, cache)


def test_what_cannot_count_the_text_asks_for_steps(by_epochs):
    with pytest.raises(ConfigError, match=r"phalanx plan does not count the training text.*--set train.steps=N"):
        by_epochs("2").require_steps("phalanx plan")


def test_labelled_texts_are_counted_over_all_clients(tmp_path):
    line = '{"text": "a cough and a cold", "label": "flu"}\n{"text": "nothing at all", "label": "well"}\n'
    for number, texts in enumerate((10, 14)):
        (tmp_path / f"train-{number}.jsonl").write_text(line.replace("all", f"all {number}") * (texts // 2))
        (tmp_path / f"test-{number}.jsonl").write_text(line.replace("a cold", "a sneeze").replace("all", "here"))
    files = {which: [str(tmp_path / f"{which}-{number}.jsonl") for number in (0, 1)] for which in ("train", "test")}
    path = tmp_path / "split.toml"
    path.write_text(f"""
[model]
from_scratch = true
architecture = {{ model_type = "gpt2", vocab_size = 300, n_positions = 16, n_embd = 32, n_layer = 4, n_head = 4 }}
[model.adapter]
rank = 4
[data]
tokenizer = {{ kind = "bpe", vocab_size = 270 }}
sequence_length = 16
[data.labelled.task]
classes = ["flu", "well"]
train = {files["train"]}
test = {files["test"]}
[train]
objective = "classification"
epochs = 3
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

    run = load_run(path)

    assert num_sequences(run, tmp_path / "cache") == 24
    assert settle_steps(run, tmp_path / "cache").train.steps == 9
