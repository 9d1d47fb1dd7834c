"""Runs that learn preferences: the reference is made once and kept, a resumed run has equal bits, and it learns."""

import json

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kept_states import PLAIN_EPS, assert_same_first_step_of_adamw, assert_same_weights, kept_state
from phalanx.errors import CheckpointError, DataError
from phalanx.objectives import OBJECTIVES
from phalanx.train import load_run
from phalanx.train.batches import reference
from phalanx.train.sessions import hooks

PREFERENCES = [name for name, one in OBJECTIVES.items() if one.target == "pair"]
RUN = """
[model]
from_scratch = true
{head}
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
preferences = {{ sources = [{{ path = "{path}" }}] }}
tokenizer = {{ kind = "bpe", vocab_size = 265 }}
sequence_length = 40
validation_share = 0.25

[train]
steps = 6
batch_size = 8
microbatches = 2
validate_every = 3
objective = "{kind}"

[optimizer]
lr = 1e-2

{engine}
"""


@pytest.fixture
def make(tmp_path):
    """Write a run on 40 pairs, of which the better answer begins with yes."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"is {n}?", "chosen": f" yes {n % 7}", "rejected": f" no {n % 5}"} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def written(kind="dpo", engine="[pipeline]\nstages = 4", overrides=()):
        head = 'head = "score"\n' if OBJECTIVES[kind].head == "score" else ""
        file = tmp_path / f"{kind}-{abs(hash(engine))}.toml"
        file.write_text(RUN.format(path=path, kind=kind, engine=engine, head=head))
        return load_run(file, overrides)

    return written


def losses(directory):
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_run_begins_at_its_reference_and_learns_which_answer_is_better(make, quietly, tmp_path):
    summary = quietly(make(overrides=("train.steps=12",)), tmp_path / "run")

    assert summary["status"] == "completed", summary["shown"]
    found = summary["preferences"]
    assert (summary["status"], summary["verdicts"]) == ("completed", [])
    assert losses(tmp_path / "run")[0] == pytest.approx(0.6931472, abs=1e-6)
    assert (found["accuracy_first"], found["margin_first"]) == (0.5, 0.0)
    assert found["kl_first"] == pytest.approx(0.0, abs=1e-6)
    assert found["accuracy"] > 0.9
    assert found["margin"] > 0.2
    assert 0.0 < found["kl"] < 1.0
    assert "validation accuracy" in summary["shown"]


@pytest.mark.slow
def test_an_interrupted_run_reads_its_reference_and_ends_with_the_same_bits(make, quietly, monkeypatch, tmp_path):
    run = make(overrides=("checkpoint.every=2",))
    whole = quietly(run, tmp_path / "whole")
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        save(self, at)
        if at == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        assert quietly(run, tmp_path / "run")["status"] == "interrupted"
    kept = (tmp_path / "run/reference.safetensors").read_bytes()
    resumed = quietly(run, tmp_path / "run", resume=True)

    assert resumed["resumed_from"] == 4
    assert resumed["final_weights_digest"] == whole["final_weights_digest"]
    assert (tmp_path / "run/reference.safetensors").read_bytes() == kept
    assert "computing the reference" not in resumed["shown"]


@pytest.mark.slow
def test_a_run_that_is_ended_while_it_computes_its_reference_goes_on_there(make, quietly, monkeypatch, tmp_path):
    run, compute = make(engine="[parallel]\ndp = 1"), reference._log_probs
    whole = quietly(run, tmp_path / "whole")
    # eight rows of forty tokens a part
    monkeypatch.setattr(reference, "_HIDDEN_BYTES", 8 * 4 * 32 * 40)

    def stop(model, rows, first, end):
        if first == 16:
            raise KeyboardInterrupt
        return compute(model, rows, first, end)

    with monkeypatch.context() as patch:
        patch.setattr(reference, "_log_probs", stop)
        assert quietly(run, tmp_path / "run")["status"] == "interrupted"
    assert len(list((tmp_path / "run/reference.parts").iterdir())) == 2
    resumed = quietly(run, tmp_path / "run", resume=True)

    assert "once, continuing an earlier session" in resumed["shown"]
    assert resumed["final_weights_digest"] == whole["final_weights_digest"]
    assert not (tmp_path / "run/reference.parts").exists()


def altered(path):
    """The same header, and one number that is another one."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def forged(path):
    """One number is another one, and the file says nothing of its numbers, as one of an older release."""
    found = load_file(path)
    found["train"][0] += 1.0
    with safe_open(path, framework="pt") as file:
        save_file(found, path, {"made_of": file.metadata()["made_of"]})


@pytest.mark.quick_cases("missing", "forged")
@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda path: path.unlink(), "is missing, and a resumed run does not compute its reference again"),
        (lambda path: path.write_bytes(b"junk"), "is not a reference file of this run"),
        (
            lambda path: save_file(load_file(path), path, {"made_of": "0" * 64}),
            "belongs to another model or to other pairs",
        ),
        (altered, "its numbers differ from those written"),
        (forged, "loader state: belongs to the corpus"),
    ],
    ids=["missing", "junk", "foreign", "altered", "forged"],
)
def test_a_reference_that_is_not_the_runs_own_is_refused(make, quietly, monkeypatch, tmp_path, harm, told):
    run = make(overrides=("checkpoint.every=2",))
    save = hooks.RunHooks.save_if_due

    def stop(self, at):
        save(self, at)
        if at == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hooks.RunHooks, "save_if_due", stop)
        quietly(run, tmp_path / "run")
    harm(tmp_path / "run/reference.safetensors")

    with pytest.raises((CheckpointError, DataError), match=told):
        quietly(run, tmp_path / "run", resume=True)


COPIES, STAGES = "dp = 2", "pp = 2"
CALM = (PLAIN_EPS, "optimizer.lr=3e-3")
"""At 1e-2 a step takes up to two thirds of a loss away and makes a difference by rounding, which is another one on each
processor, ten times as large."""
RANKS = [
    pytest.param(
        kind, layout, id=f"{kind} {layout}", marks=() if (kind, layout) == ("kto", COPIES) else pytest.mark.slow
    )
    for kind in PREFERENCES
    for layout in (COPIES, STAGES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), RANKS)
def test_ranks_learn_what_one_process_learns_under_adamw(make, quietly, tmp_path, kind, layout):
    kept = (*CALM, "checkpoint.every=1", "checkpoint.keep=6")
    # of each copy half the microbatches: the same rows in each
    cut = ("train.microbatches=1",) if layout == COPIES else ()
    one = quietly(make(kind, "[parallel]\ndp = 1", kept), tmp_path / "one")
    two = quietly(make(kind, f"[parallel]\n{layout}", (*kept, *cut)), tmp_path / "two")

    within = {"rel": 1e-6} if layout == COPIES else {"rel": 1e-6, "abs": 1e-6}
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), **within)
    # a reward model has no divergence
    told = {name: value for name, value in one["preferences"].items() if value is not None}
    assert {name: two["preferences"][name] for name in told} == pytest.approx(told, rel=1e-4, abs=1e-6)
    assert two["preferences"].keys() == one["preferences"].keys()
    first, last = ([kept_state(tmp_path / name, step) for name in ("two", "one")] for step in (1, 6))
    assert_same_first_step_of_adamw(*first)
    assert_same_weights(*last)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PREFERENCES)
def test_the_pipeline_learns_what_one_process_learns(make, quietly, tmp_path, kind):
    quietly(make(kind, overrides=CALM), tmp_path / "stages")
    quietly(make(kind, "[parallel]\ndp = 1", CALM), tmp_path / "one")

    assert losses(tmp_path / "stages") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ("train.objective='causal_lm'",),
            "and data.preferences belong together, but the objective does not read preferences",
        ),
        (("train.batch_size=6", "train.microbatches=2"), "rows are pairs, which 2 microbatches would split"),
        (("data.packing='best_fit'",), "is for text; an answer with its prompt is one row"),
        (("train.objective={kind='dpo', beta=0.0}",), "greater than 0"),
    ],
)
def test_a_run_file_that_cannot_be_is_refused(make, overrides, told):
    from phalanx.errors import ConfigError

    with pytest.raises(ConfigError, match=told):
        make(overrides=overrides)


def test_a_reward_model_needs_a_head_that_scores(make, quietly, tmp_path):
    from phalanx.errors import ConfigError

    run = make("reward")
    wrong = run.model_copy(update={"model": run.model.model_copy(update={"head": None})})

    with pytest.raises(ConfigError, match=r'train.objective = "reward" needs "score"; set model.head = "score"'):
        quietly(wrong, tmp_path / "run")
