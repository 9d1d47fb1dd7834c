"""Whole runs with differential privacy: the budget, its end, what a killed run has spent, and what is refused."""

import io
import json
import os
import signal

import pytest
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers

from forked_child import run_in_fork
from late_imports import need_module
from phalanx.errors import AuditLogError, ConfigError
from phalanx.security.privacy import PoissonGaussian
from phalanx.telemetry import read_metrics
from phalanx.train import load_run, train
from phalanx.train.sessions import hooks
from tiny_run_file import tiny_run_file

need_module("opacus", "needs the extra `dp`")

ADAPTER = '[model.adapter]\nkind = "lora"\nrank = 4\nalpha = 8\n'
RANKS = "[parallel]\ndp = 1\n"
PRIVACY = "[privacy]\nepsilon = 8.0\ndelta = 1e-4\nclip_norm = 0.5\n"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """One of public text: single bytes."""
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: n for n, one in enumerate(["<|endoftext|>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def make_run(tmp_path_factory, vocabulary):
    def make(sections=RANKS + PRIVACY, *overrides, bpe=False, adapter=ADAPTER):
        text = tiny_run_file(f"[checkpoint]\nevery = 2\n{adapter}{sections}", steps=6, validate_every=6)
        if not bpe:
            text = text.replace('{ kind = "bpe", vocab_size = 300 }', f'{{ kind = "file", path = "{vocabulary}" }}')
        path = tmp_path_factory.mktemp("file") / "tiny.toml"
        path.write_text(text)
        return load_run(path, overrides)

    return make


@pytest.fixture(scope="module")
def whole(make_run, tmp_path_factory):
    """A run that was left alone."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return quietly(make_run(), directory), directory


def quietly(run, directory, **options):
    return train(run, directory, console=Console(file=io.StringIO(), width=200), **options)


def bodies_of(directory, kind):
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [line["body"] for line in lines if line["kind"] == kind]


def charges_of(directory):
    return [body["number"] for body in bodies_of(directory, "privacy_charged")]


def test_a_run_learns_within_its_budget_and_says_what_it_has_spent(whole):
    summary, directory = whole

    told = summary["privacy"]
    assert summary["status"] == "completed"
    assert told["charges"] == summary["steps"] == 6
    assert told["sampling"] == "poisson"
    assert 0.9 * 8 < told["epsilon_spent"] <= 8.0
    assert charges_of(directory) == list(range(6))
    curve = [one["epsilon"] for one in read_metrics(directory / "metrics.jsonl")]
    assert curve == sorted(curve)
    assert 0 < curve[0] < curve[-1] <= 8.0
    # the key of the draw is a secret
    assert (directory / "secrets" / "sampling.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("sampling", ["poisson", pytest.param("order", marks=pytest.mark.slow)])
def test_checkpoints_which_the_adversary_has_tell_nothing_exact_of_the_rows(make_run, whole, tmp_path, sampling):
    directory = whole[1]
    if sampling == "order":
        directory = tmp_path / "run"
        quietly(make_run(RANKS + PRIVACY, "privacy.sampling=order"), directory)
    (opening,) = (body for body in bodies_of(directory, "run_started"))

    for path in (directory / "checkpoints").glob("*/state.json"):
        text = path.read_text()
        # by a digest of all rows, or by a loss, whoever knows all but one could try the last one
        assert opening["corpus"] not in text
        assert str(int(opening["corpus"][:13], 16)) not in text
        totals = json.loads(text)["totals"]
        assert (totals["loss_first"], totals["loss_last"], totals["tokens"], totals["wall_s"]) == (None, None, 0, 0.0)


def test_a_run_ends_before_the_step_that_would_spend_more(make_run, whole, tmp_path):
    told = whole[0]["privacy"]
    step = PoissonGaussian(told["noise_multiplier"], told["rate"])
    for_three = (step.epsilon_after(3, 1e-4) + step.epsilon_after(4, 1e-4)) / 2
    run = make_run(RANKS + PRIVACY + f"noise_multiplier = {step.noise_multiplier}\n", f"privacy.epsilon={for_three}")

    summary = quietly(run, tmp_path / "run")

    assert summary["status"] == "completed"
    assert summary["steps"] == 3
    assert summary["privacy"]["epsilon_spent"] == pytest.approx(step.epsilon_after(3, 1e-4))
    assert '"kind":"budget_spent"' in (tmp_path / "run" / "events.jsonl").read_text()
    # nothing is left for another session
    assert quietly(load_run(tmp_path / "run" / "config.toml"), tmp_path / "run", resume=True)["steps"] == 3


def killed_after(num_steps, run, directory, monkeypatch):
    """Run in a child that is killed between a step and its checkpoint."""
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == num_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        assert run_in_fork(lambda: quietly(run, directory)) == -signal.SIGKILL


def test_a_killed_run_has_spent_what_it_drew_and_pays_for_steps_that_it_does_again(make_run, tmp_path, monkeypatch):
    run = make_run(RANKS + PRIVACY, "privacy.epsilon=40.0", "privacy.noise_multiplier=1.0")
    killed_after(4, run, tmp_path / "run", monkeypatch)
    assert charges_of(tmp_path / "run") == [0, 1, 2, 3]

    summary = quietly(run, tmp_path / "run", resume=True)

    # from the checkpoint of step 2: steps 2 and 3 are paid twice, and no number comes twice
    assert summary["resumed_from"] == 2
    assert summary["steps"] == 6
    assert summary["privacy"]["charges"] == 8
    assert charges_of(tmp_path / "run") == list(range(8))
    # what checkpoints leave out of the rows comes from metrics.jsonl
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (summary["loss_first"], summary["loss_last"]) == (records[0]["loss"], records[-1]["loss"])
    assert summary["tokens"] == sum(record["tokens"] for record in records)


def test_a_ledger_from_which_charges_are_cut_is_refused(make_run, tmp_path, monkeypatch):
    run = make_run(RANKS + PRIVACY, "privacy.epsilon=40.0", "privacy.noise_multiplier=1.0")
    directory = tmp_path / "run"
    quietly(run, directory)
    (directory / "summary.json").unlink()
    log = directory / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    last = max(number for number, line in enumerate(lines) if b'"privacy_charged"' in line)
    log.write_bytes(b"".join(lines[:last]))

    with pytest.raises(AuditLogError, match="put the whole log back"):
        quietly(run, directory, resume=True)


@pytest.mark.parametrize(
    ("sections", "overrides", "options", "words"),
    [
        (RANKS + PRIVACY + "mean_rows = 4\n", (), {}, "privacy.mean_rows: a step draws train.batch_size rows"),
        (RANKS + PRIVACY, ("parallel.pp=2",), {}, "parallel.pp = 2: each rank would see a part"),
        (
            RANKS + PRIVACY,
            ("parallel.activation_checkpointing=full",),
            {},
            "parallel.activation_checkpointing: per-row gradients",
        ),
        (RANKS + PRIVACY, ("parallel.max_dp=4",), {}, "parallel.max_dp: rows are drawn for a fixed number of copies"),
        (RANKS + PRIVACY, ("parallel.dp=2", "parallel.zero=2"), {}, "ranks add up and divide gradients before"),
        (RANKS + PRIVACY, (), {"adapter": ADAPTER + "dora = true\n"}, "model.adapter.dora: Opacus clips"),
        (RANKS + PRIVACY, (), {"adapter": '[model.adapter]\nkind = "ptuning"\n'}, "per-row gradients are not tested"),
        (RANKS + PRIVACY, ("train.precision=bf16",), {}, "do not bound a row's contribution"),
        (RANKS + PRIVACY, (), {"bpe": True}, "a vocabulary trained on the rows reveals them"),
        (RANKS + PRIVACY + '[[tracking]]\nkind = "trackio"\n', (), {}, "tracking: the loss of training rows"),
        (RANKS + PRIVACY, ("train.neftune_alpha=5.0",), {}, "a row's place in the draw"),
        (RANKS + PRIVACY, ("train.objective=span_corruption",), {}, "may not be a sum over rows"),
    ],
)
def test_what_its_bound_would_not_cover_is_refused_by_name(make_run, sections, overrides, options, words):
    with pytest.raises(ConfigError, match=words):
        make_run(sections, *overrides, **options)


@pytest.mark.slow
def test_tied_weights_are_refused_and_the_way_out_named(make_run, tmp_path):
    run = make_run(adapter="")

    with pytest.raises(ConfigError, match=r"cannot be told apart .*model.adapter.kind = \"lora\""):
        quietly(run, tmp_path / "run")


@pytest.mark.slow
def test_a_delta_that_a_program_which_publishes_rows_keeps_is_refused(make_run, tmp_path):
    run = make_run(RANKS + PRIVACY, "privacy.delta=0.09")

    with pytest.raises(ConfigError, match="publishes one row at random keeps within it"):
        quietly(run, tmp_path / "run")


@pytest.mark.slow
def test_an_order_that_the_public_can_compute_earns_no_amplification(make_run, whole, tmp_path):
    run = make_run(RANKS + PRIVACY, "privacy.sampling=order")

    told = quietly(run, tmp_path / "run")["privacy"]

    assert told["rate"] == 1.0
    assert told["epsilon_spent"] <= 8.0
    # for the same budget it takes many times the noise
    assert told["noise_multiplier"] > 4 * whole[0]["privacy"]["noise_multiplier"]
