"""Whole runs of a pipeline that hides single rows: their budget, kill -9, and what is refused by name."""

import json
import os
import signal

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from forked_child import run_in_fork
from late_imports import need_module
from phalanx.errors import ConfigError
from phalanx.lab.attacks import attackers_of, load_attack
from phalanx.models import open_model
from phalanx.security.privacy import CappedPoissonGaussian
from phalanx.telemetry import read_metrics
from phalanx.train import load_run
from phalanx.train.sessions import hooks
from phalanx.train.setup.layout import make_plan
from tiny_run_file import tiny_run_file

need_module("opacus", "needs the extra `dp`")

STAGES = "[pipeline]\nstages = 3\n[guard]\nshadow = 'lockstep'\nkeep_states = 0\n"
PRIVACY = "[privacy]\nepsilon = 8.0\ndelta = 1e-4\nclip_norm = 0.5\n"
PLACES = "train.batch_size=24", "train.microbatches=24"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """One of public text: single bytes."""
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.json"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: n for n, one in enumerate(["<|endoftext|>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path))
    return path


@pytest.fixture
def private(tmp_path, vocabulary):
    def make(sections=STAGES + PRIVACY, *overrides, steps=3):
        text = tiny_run_file(f"[checkpoint]\nevery = 2\njournal = false\n{sections}", steps=steps, validate_every=3)
        text = text.replace('{ kind = "bpe", vocab_size = 300 }', f'{{ kind = "file", path = "{vocabulary}" }}')
        path = tmp_path / "tiny.toml"
        path.write_text(text.replace("eos_token_id = 0\n", "eos_token_id = 0\ntie_word_embeddings = false\n"))
        return load_run(path, (*PLACES, *overrides))

    return make


EXPERTS = (
    '{model_type="qwen3_moe",vocab_size=300,num_hidden_layers=4,hidden_size=16,intermediate_size=24,num_experts=4,'
    "moe_intermediate_size=8,num_experts_per_tok=2,num_attention_heads=2,num_key_value_heads=1,head_dim=8,"
    "max_position_embeddings=16,tie_word_embeddings=false}"
)
BARE = """
from phalanx.lab.attacks import Attack
from phalanx.lab.attacks.copies import AttackedCopy


class Bare(Attack):
    def wrap_copy(self, copy, held):
        return BareCopy(copy, self) if held else copy


class BareCopy(AttackedCopy):
    def __init__(self, honest, attack):
        super().__init__(honest)
        self._attack = attack

    def weight_gradient(self, step, noise_key):
        if not self._attack.lies_in(step):
            return super().weight_gradient(step, noise_key)
        self._attack.log_lie(self.spec.index, step, what="gradient")
        rows = self.plan.privacy.mean_rows
        return {name: gradient / rows for name, gradient in self.runner.take_gradients().items()}
"""


def bodies(directory, kind):
    lines = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [line["body"] for line in lines if line["kind"] == kind]


def test_a_run_of_stages_learns_within_its_budget_and_says_whom_the_bound_holds_against(private, quietly, tmp_path):
    summary = quietly(private(STAGES + PRIVACY, "privacy.epsilon=2.0"), tmp_path / "run")

    told = summary["privacy"]
    assert summary["status"] == "completed"
    assert told["charges"] == summary["steps"] == 3
    assert 0.9 * 2 < told["epsilon_spent"] <= 2.0
    assert told["against"] == "readers of the weights; owner, workers and auditors know the noise"
    assert f"the bound holds against {told['against']}" in summary["shown"]
    assert told["places"] == 24
    step = CappedPoissonGaussian(told["noise_multiplier"], told["rate"], told["rows"], told["places"])
    assert step.epsilon_after(3, 1e-4) == pytest.approx(told["epsilon_spent"])
    assert len(bodies(tmp_path / "run", "noise_committed")) == 1
    # the secret of the noise is on no disk: the key of the draw is the one secret that the budget leaves
    assert {path.name for path in (tmp_path / "run" / "secrets").iterdir()} == {"audit.head", "sampling.key"}
    assert summary["evicted"] == []


@pytest.mark.slow
def test_a_killed_run_draws_other_rows_under_other_noise_and_pays_again(private, quietly, tmp_path, monkeypatch):
    run, directory = private(STAGES + PRIVACY + "noise_multiplier = 1.0\n"), tmp_path / "run"
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        if at == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        save(self, at)

    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        assert run_in_fork(lambda: quietly(run, directory)) == -signal.SIGKILL

    summary = quietly(run, directory, resume=True)

    assert summary["steps"] == 3
    assert summary["privacy"]["charges"] == 4
    assert [body["number"] for body in bodies(directory, "privacy_charged")] == list(range(4))
    first, second = (set(body["keys"].values()) for body in bodies(directory, "noise_committed"))
    assert not first & second


@pytest.mark.slow
def test_a_worker_process_that_leaves_its_noise_out_is_evicted_before_that_step_is_applied(private, quietly, tmp_path):
    (tmp_path / "mine.py").write_text(BARE)
    run = private(
        STAGES + PRIVACY + "[attack]\nkind = 'mine.py:Bare'\nstages = [1]\nfrom_step = 1\n", "pipeline.spares=1"
    )
    load_attack(run.attack, tmp_path)

    summary = quietly(run, tmp_path / "run", open_workers=attackers_of(run.attack, home=tmp_path))

    assert summary["evicted"] == ["worker-1"]
    assert (summary["status"], summary["steps"], summary["privacy"]["charges"]) == ("completed", 3, 3)
    (verdict,) = bodies(tmp_path / "run", "verdict")
    assert (verdict["party"], verdict["offence"], verdict["step"]) == ("worker-1", "gradient", 1)
    # the same rows were done again under other noise, before anything of the step was applied
    assert [body["step"] for body in bodies(tmp_path / "run", "noise_committed")] == [0, 1]
    assert [line["attempts"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 1]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("train.microbatches=12",), "stages clip single rows, so each microbatch is one"),
        (("guard.shadow=gradient",), "a step without noise could be published before its detection"),
        (("guard.mode=off",), "a step without noise could be published"),
        (("guard.keep_states=10",), "guard.keep_states = 10: a published step could be repeated"),
        (("pipeline.layout={tp=2}",), "each rank of a worker sees a part of a row's gradient"),
        (
            ("privacy.clipping=hooks",),
            "privacy.clipping: with one row a microbatch, a stage has the gradient of each row",
        ),
        (("privacy.mean_rows=25",), "privacy.mean_rows = 25 but room for train.batch_size = 24"),
        (("privacy.mean_rows=4", "privacy.sampling=order"), 'privacy.mean_rows with sampling = "order"'),
        (("train.steps=0", "train.epochs=1"), "train.epochs: the number of rows of a step varies"),
        (("train.device=cuda",), "noise and clipping of stages are not supported there"),
        (("model.adapter={rank=2,dropout=0.1}",), "auditors draw it by the index of a microbatch"),
        (("train.neftune_alpha=5.0",), "a row's place in the draw"),
        (("train.precision=bf16",), "do not bound a row's contribution"),
        (("train.objective=span_corruption",), "may not be a sum over rows"),
    ],
)
def test_what_a_bound_of_stages_would_not_cover_is_refused_by_name(private, overrides, words):
    with pytest.raises(ConfigError, match=words):
        private(STAGES + PRIVACY, *overrides)


def test_a_split_has_no_noise_yet(private):
    with pytest.raises(ConfigError, match="clients and enclave of \\[split\\] share no secret"):
        private(PRIVACY, "split={cut=2,allow_insecure_sim=true}", "model.adapter={rank=2}")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.architecture.tie_word_embeddings=true",), "excludes tied weights without an adapter"),
        (("model.architecture.resid_pdrop=0.1",), "the model has resid_pdrop = 0.1"),
        ((f"model.architecture={EXPERTS}",), "qwen3_moe balances them over the present rows"),
    ],
)
def test_a_model_whose_rows_are_not_apart_is_refused_before_the_first_step(private, tmp_path, overrides, words):
    run = private(STAGES + PRIVACY, *overrides)

    with pytest.raises(ConfigError, match=words):
        make_plan(run, open_model(run.model, tmp_path / "models", run.train.seed))


def test_too_little_room_for_a_sample_is_refused_with_what_there_is_room_for(private, quietly, tmp_path):
    run = private(STAGES + PRIVACY, "privacy.mean_rows=20")

    with pytest.raises(ConfigError, match=r"privacy.mean_rows = 20: .* at most \d+ are drawn in the mean here"):
        quietly(run, tmp_path / "run")
