"""Runs that learn several objectives at once: their gradient, curves of each, resumes, validation and refusals."""

import json

import pytest
import torch

from kept_states import kept_state
from phalanx.config import digest_config
from phalanx.errors import CheckpointError, ConfigError, DataError
from phalanx.models import StageSpec, build_stage, open_model
from phalanx.objectives import PART, objective_of
from phalanx.policy import TrainingPolicy, check_start
from phalanx.telemetry import read_metrics
from phalanx.train import PastRun, load_run
from phalanx.train.batches import mixed
from phalanx.train.records.lineage import dataset_of
from phalanx.train.records.policy_facts import facts_of_run
from phalanx.train.sessions import hooks
from phalanx.train.sessions.continue_from import check_adoption

RUN = """
[model]
from_scratch = true
[model.architecture]
model_type = "llama"
vocab_size = 300
num_hidden_layers = 4
hidden_size = 32
intermediate_size = 48
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 48
tie_word_embeddings = true
bos_token_id = 0
eos_token_id = 0

[data]
sources = [{{ kind = "text", path = "{home}/text" }}]
tokenizer = {{ kind = "bpe", vocab_size = 265 }}
sequence_length = 40
validation_share = 0.2

[train]
steps = 6
batch_size = 16
microbatches = 4
validate_every = 3

[[objectives]]
name = "answers"
weight = 0.5
microbatches = 1
[objectives.data]
conversations = {{ sources = [{{ path = "{home}/talks.jsonl" }}], template = "plain" }}
validation_share = 0.25

[[objectives]]
name = "judged"
objective = {{ kind = "dpo", beta = 0.5 }}
weight = 0.25
microbatches = 1
[objectives.data]
preferences = {{ sources = [{{ path = "{home}/pairs.jsonl" }}] }}
validation_share = 0.25

[optimizer]
lr = 1e-2

{engine}
"""
ALONE, RANKS = (
    "[pipeline]\nstages = 2\n[checkpoint]\nevery = 1\nkeep = 6\njournal = false",
    "[parallel]\n{}\n[checkpoint]\nevery = 1\nkeep = 6",
)
WEIGHTS = {"main": 1.0, "answers": 0.5, "judged": 0.25}


@pytest.fixture
def make(tmp_path):
    """Write a run on a text, conversations and pairs."""
    (tmp_path / "text").mkdir()
    for n in range(24):
        (tmp_path / f"text/{n}.txt").write_text(
            f"Number {n} is a number; it follows {n - 1} and precedes {n + 1}. " * 4
        )
    files = {
        "talks": [
            {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"yes, {n % 7}"}]}
            for n in range(40)
        ],
        "pairs": [{"prompt": f"is {n}?", "chosen": f" yes {n % 7}", "rejected": f" no {n % 5}"} for n in range(40)],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def written(engine=ALONE, overrides=()):
        file = tmp_path / f"run-{abs(hash(engine))}.toml"
        file.write_text(RUN.format(home=tmp_path, engine=engine))
        return load_run(file, overrides)

    return written


def rows_of(directory):
    return read_metrics(directory / "metrics.jsonl")


def gradients_by_hand(run, directory, batch):
    """Weighted gradient of each mean loss, computed apart in one whole model, then added up; and the means."""
    source = open_model(run.model, directory / "none", run.train.seed)
    stage = build_stage(
        source,
        StageSpec(0, 1, 0, source.num_layers),
        adapter=None,
        activation_checkpointing=False,
        attention="sdpa",
        seed=run.train.seed,
    )
    sums, means = {}, {}
    for number, share in enumerate(run.objective_shares):
        objective, rows = objective_of(share.objective), batch.extras[PART] == number
        loss, targets = objective(
            stage(batch.input_ids[rows]),
            batch.labels[rows],
            {name: batch.extras[name][rows] for name in objective.extras},
        )
        means[share.name] = float(loss.detach()) / targets
        named = stage.all_parameters()
        gradients = torch.autograd.grad(share.weight * loss / targets, list(named.values()))
        for name, gradient in zip(named, gradients, strict=True):
            sums[name] = sums.get(name, 0) + gradient
    return sums, means


@pytest.mark.quick_cases("pipeline")
@pytest.mark.parametrize("engine", [ALONE, RANKS.format("dp = 1")], ids=["pipeline", "ranks"])
def test_the_first_step_has_the_weighted_sum_of_gradients_that_are_computed_apart(
    make, quietly, tmp_path, monkeypatch, engine
):
    run = make(engine, ("train.steps=2", "optimizer.clip_norm=1e6"))
    batches, draw = [], mixed.MixedLoader.next_batch
    monkeypatch.setattr(mixed.MixedLoader, "next_batch", lambda self: batches.append(draw(self)) or batches[-1])

    summary = quietly(run, tmp_path / "run")

    assert summary["status"] == "completed", summary["shown"]
    expected, means = gradients_by_hand(run, tmp_path, batches[0])
    state, row = kept_state(tmp_path / "run", 1), rows_of(tmp_path / "run")[0]
    found = {name.removeprefix("exp_avg/"): tensor for name, tensor in state.items() if name.startswith("exp_avg/")}
    assert found.keys() <= expected.keys() and len(found) > 20
    for name, moment in found.items():
        # the first moment after one step is a tenth of the gradient
        torch.testing.assert_close(
            moment * 10, expected[name], rtol=1e-5, atol=1e-7, msg=lambda said, at=name: f"{at}: {said}"
        )
    assert {name: part["loss"] for name, part in row["objectives"].items()} == pytest.approx(means, rel=1e-6)
    assert row["loss"] == pytest.approx(sum(WEIGHTS[name] * mean for name, mean in means.items()), rel=1e-6)


def test_each_objective_has_a_curve_its_rows_and_a_validation(make, quietly, tmp_path):
    run = make()
    summary = quietly(run, tmp_path / "run")

    assert summary["status"] == "completed", summary["shown"]
    rows = rows_of(tmp_path / "run")
    for row in rows:
        parts = row["objectives"]
        assert {name: (part["rows"], part["tokens"], part["weight"]) for name, part in parts.items()} == {
            "main": (8, 320, 1.0), "answers": (4, 160, 0.5), "judged": (4, 160, 0.25)
        }  # fmt: skip
        assert sum(part["tokens"] for part in parts.values()) == row["tokens"]
        assert all(0 < part["labels"] <= part["tokens"] for part in parts.values())
    # the model begins at its reference
    assert rows[0]["objectives"]["judged"]["loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert rows[-1]["objectives"]["main"]["loss"] < rows[0]["objectives"]["main"]["loss"] - 0.3
    assert set(rows[2]["validation_sets"]) == {"answers", "judged"}
    found = summary["validation_sets"]
    assert found["answers"]["perplexity"] < found["answers"]["perplexity_first"]
    assert (found["judged"]["accuracy_first"], found["judged"]["margin_first"]) == (0.5, 0.0)
    assert found["judged"]["kl"] > 0.0
    assert summary["validation_perplexity"] < summary["validation_perplexity_first"]
    assert (tmp_path / "run/reference-judged.safetensors").is_file()
    assert "judged accuracy" in summary["shown"]
    with pytest.raises(DataError, match=r"learned .*objectives"):
        dataset_of(PastRun(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"objectives: differs from"):
        check_adoption(run.model_copy(update={"objectives": run.objectives[:1]}), PastRun(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp = 2",
        pytest.param("pp = 2", marks=pytest.mark.slow),
        pytest.param("dp = 2\nzero = 2", marks=pytest.mark.slow),
    ],
)
def test_ranks_learn_what_one_process_learns_and_tell_the_same_curves(make, quietly, tmp_path, layout):
    for name, engine in (("one", "dp = 1"), ("several", layout)):
        run = make(RANKS.format(engine), ("optimizer.eps=1e-3",))
        summary = quietly(run, tmp_path / name)
        assert summary["status"] == "completed", summary["shown"]

    expected, found = (rows_of(tmp_path / name) for name in ("one", "several"))

    for ours, theirs in zip(found, expected, strict=True):
        assert ours["batch"] == theirs["batch"]
        for name, part in theirs["objectives"].items():
            assert ours["objectives"][name] == pytest.approx(part, rel=1e-5)
    sets = [rows[-1]["validation_sets"]["judged"] for rows in (found, expected)]
    assert sets[0] == pytest.approx(sets[1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("engine", [ALONE, pytest.param(RANKS.format("dp = 1"), marks=pytest.mark.slow)])
def test_an_interrupted_run_ends_with_the_same_bits(make, quietly, monkeypatch, tmp_path, engine):
    run = make(engine)
    whole = quietly(run, tmp_path / "whole")
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        save(self, at)
        if at == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        assert quietly(run, tmp_path / "run")["status"] == "interrupted"
    resumed = quietly(run, tmp_path / "run", resume=True)

    assert resumed["resumed_from"] == 4
    assert resumed["final_weights_digest"] == whole["final_weights_digest"]
    assert resumed["validation_sets"] == whole["validation_sets"]
    parts = [[row["objectives"] for row in rows_of(tmp_path / name)] for name in ("whole", "run")]
    assert parts[0] == parts[1]


@pytest.mark.slow
def test_the_seed_decides_the_batches_and_a_state_of_other_objectives_is_refused(make, quietly, tmp_path):
    runs = [make(overrides=("train.steps=2", f"train.seed={seed}", "train.validate_every=0")) for seed in (1, 1, 2)]
    for number, run in enumerate(runs):
        quietly(run, tmp_path / str(number))

    first, again, other = ([row["batch"] for row in rows_of(tmp_path / str(number))] for number in range(3))

    assert first == again != other
    loader = mixed.MixedLoader(runs[0].objective_shares[:1], [object()])
    for state in ({}, {"num_samples": 4}, {"objectives": {"judged": {}}}, {"objectives": {"main": 3}}):
        with pytest.raises(CheckpointError, match="loader state"):
            loader.load_position(state)


@pytest.mark.slow
def test_a_lying_stage_is_named_and_the_honest_parties_end_with_the_bits_of_a_clean_run(make, quietly, tmp_path):
    guarded = "[pipeline]\nstages = 4\n"
    clean = quietly(make(guarded), tmp_path / "clean")
    attacked = quietly(
        make(guarded + '[attack]\nkind = "sign_flip"\nstages = [1]\nrate = 0.5\n'), tmp_path / "attacked"
    )

    assert (clean["status"], clean["verdicts"]) == ("completed", [])
    assert [verdict["stage"] for verdict in attacked["verdicts"]] == [1]
    assert attacked["final_weights_digest"] == clean["final_weights_digest"]
    assert rows_of(tmp_path / "clean")[-1]["objectives"] == rows_of(tmp_path / "attacked")[-1]["objectives"]


ENTRY = "objectives=[{{name='x',microbatches={},objective='{}',data={{{}}}}}]"
TEXT, PAIRS = "sources=[{kind='python_manual'}]", "preferences={sources=[{path='p.jsonl'}]}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((ENTRY.format(4, "causal_lm", TEXT),), "4 microbatches of train.microbatches = 4 leave none"),
        ((ENTRY.format(1, "dpo", TEXT),), r'objectives.0.objective = "dpo" reads preferences'),
        ((ENTRY.format(1, "causal_lm", PAIRS),), r'objectives.0.objective = "causal_lm" reads no preferences'),
        ((ENTRY.format(1, "causal_lm", ""),), r"objectives.0.data: expected either sources"),
        ((ENTRY.format(1, "reward", PAIRS),), r'"reward": it needs another head'),
        ((ENTRY.format(1, "masked", TEXT),), r'"masked": it makes rows of its own'),
        ((ENTRY.format(1, "grpo", TEXT),), r'"grpo": it learns from texts that the model writes'),
        ((ENTRY.format(1, "ppo", TEXT),), r'"ppo": it needs another head'),
        ((ENTRY.format(1, "classification", TEXT),), r'"classification": it needs another head'),
        ((ENTRY.format(1, "weighted_causal_lm", TEXT),), "weighted = true"),
        ((ENTRY.format(1, "mixed", TEXT),), "mixed"),
        ((ENTRY.format(1, "dpo", PAIRS), "train.batch_size=12"), "12 rows are in pairs, which 4 microbatches of 1"),
        ((ENTRY.format(1, "causal_lm", TEXT).replace("'x'", "'main'"),), '"main" is taken'),
        ((ENTRY.format(1, "causal_lm", TEXT).replace("'x'", "'validation'"),), '"validation" is taken'),
        (("train.objective='masked'",), r'"masked" excludes \[\[objectives\]\]'),
        (("train.steps-", "train.epochs=1"), "each of .* has passes of its own"),
        (("privacy={epsilon=8.0,delta=1e-3}", "data.tokenizer={kind='model'}"), r"\[privacy\] excludes \[\[objectives"),
        (("checkpoint.best='other'",), "expected one of validation, answers, judged"),
    ],
)
def test_a_run_file_that_cannot_be_meant_is_refused_by_name(make, overrides, message):
    with pytest.raises(ConfigError, match=message):
        make(overrides=overrides)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp = 2", "parallel.tp = 2 divides the vocabulary"),
        ("cp = 2", "parallel.cp = 2 divides rows"),
        ("dp = 4", "16 rows are in pairs, which 4 microbatches of 4 copies"),
        ("dp = 2\nouter = { every = 1 }", "parallel.outer: each island"),
        ("dp = 1\n[deepspeed]\nzero = 1", r"\[deepspeed\] and \[objectives\] exclude each other"),
    ],
)
def test_a_layout_that_cannot_learn_them_is_refused_by_name(make, layout, message):
    with pytest.raises(ConfigError, match=message):
        make(RANKS.format(layout))


def test_a_policy_that_asks_for_signed_data_stops_a_run_with_data_beside_it(make, tmp_path):
    policy = TrainingPolicy.model_validate_json('{"name": "ours", "data": {"licences": ["CC0-1.0"]}}')

    facts = facts_of_run(make(), tmp_path)

    assert (facts.sources, facts.signer) == (None, None)
    assert [breach.clause for breach in check_start(policy, facts)] == ["data"]


def test_a_run_file_is_kept_as_it_is_written_and_every_weight_is_in_its_digest(make):
    run = make()

    again = type(run).model_validate_json(run.model_dump_json())

    assert digest_config(again) == digest_config(run)
    heavier = run.model_copy(
        update={"objectives": (run.objectives[0].model_copy(update={"weight": 2.0}), run.objectives[1])}
    )
    assert digest_config(heavier) != digest_config(run)
