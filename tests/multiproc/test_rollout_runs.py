"""Learning from what the model writes, in real runs: no liar leaves a trace, a killed owner writes the same again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import Place, end_all, make_place
from test_crashes import kill_owner, whole_and_killed
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kept_states import (
    DIVIDED,
    PLAIN_EPS,
    WITHIN,
    assert_same_first_step_of_adamw,
    assert_same_weights,
    kept_state,
    rounded_gradients,
)
from phalanx.telemetry import read_metrics

STEPS = 10
RUN = """
[model]
from_scratch = true

[model.architecture]
model_type = "gpt2"
vocab_size = 12
n_positions = 12
n_embd = 32
n_layer = 4
n_head = 4
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0
bos_token_id = 0
eos_token_id = 0

[data]
prompts = "PLACE/prompts.jsonl"
tokenizer = {{ kind = "file", path = "PLACE/tokenizer.json" }}
sequence_length = 8
validation_share = 0.2
max_validation_sequences = 8

[train]
steps = {steps}
batch_size = 16
microbatches = 4
seed = 3

[train.objective]
kind = "grpo"
group = 4
max_new_tokens = 4
updates = 2
kl = 0.05

[rewards]
of = [{{ kind = "places" }}]

[optimizer]
lr = 1e-2
warmup_steps = 0
"""
PIPELINE = """
[pipeline]
stages = 4
step_timeout_s = 60.0

[guard]
audit_rate = 0.25
keep_states = 0
step_audit_rate = 0.0
owner_audit_rate = 0.0
gradient_screen = false

[checkpoint]
every = 3
"""
LEARNED = ("reward", "kl", "text_tokens", "texts_ended", "batch", "loss", "grad_norm")


def written(place: Place, engine: str = PIPELINE) -> Place:
    """Put run file, prompts and vocabulary of digits into a place."""
    words = {word: number for number, word in enumerate(["<|endoftext|>", *"0123456789", ">"])}
    vocabulary = Tokenizer(models.WordLevel(words, ">"))
    vocabulary.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    vocabulary.decoder = decoders.Fuse()
    vocabulary.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    vocabulary.save(str(place.path / "tokenizer.json"))
    prompts = [{"prompt": f"{n:0{2 + n % 2}}>", "answer": f"{n:02}"[::-1]} for n in range(100)]
    (place.path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    place.run_file.write_text((RUN.format(steps=STEPS) + engine).replace("PLACE", str(place.path)))
    return place


@pytest.fixture
def rollouts(place: Place) -> Place:
    return written(place)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Summary and metrics of the run in which nothing goes wrong."""
    place = written(make_place(tmp_path_factory.mktemp("undisturbed")))
    summary = place.finish()
    yield summary, read_metrics(place.path / "run" / "metrics.jsonl")
    end_all(place)


def learned(place: Place) -> list[list[Any]]:
    lines = read_metrics(place.path / "run" / "metrics.jsonl")
    return [[line["step"], *(line[name] for name in LEARNED)] for line in lines]


def of(lines: list[dict[str, Any]]) -> list[list[Any]]:
    return [[line["step"], *(line[name] for name in LEARNED)] for line in lines]


def test_texts_are_written_rewarded_and_measured(undisturbed):
    summary, lines = undisturbed

    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    assert 0.0 <= summary["validation_reward_first"] <= 1.0
    assert summary["validation_reward"] == lines[-1]["validation_reward"]
    # two steps learn from the same texts, and the next ones are others
    rewards = [line["reward"] for line in lines]
    assert rewards[0::2] == rewards[1::2]
    assert len(set(rewards[0::2])) > 1
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert lines[-1]["kl"] > 0.0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sign_flip", pytest.param("gaussian", marks=pytest.mark.slow)])
def test_a_liar_is_named_in_its_first_step_and_is_in_no_text_and_no_weight(rollouts, undisturbed, kind):
    clean, lines = undisturbed

    summary = rollouts.finish(f"attack.kind='{kind}'", "attack.stages=[1]", "attack.rate=0.3", "attack.seed=1")

    assert summary["attacks_injected"] == summary["detections"] == 1
    assert (summary["evicted"], summary["false_accusations"]) == (["worker-1"], 0)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert learned(rollouts) == of(lines)


# the defence is off, and the liar wins
@pytest.mark.slow
def test_without_a_guard_a_liar_bends_texts_and_weights(rollouts, undisturbed):
    clean, lines = undisturbed
    attack = ("attack.kind='sign_flip'", "attack.stages=[1]", "attack.rate=0.3", "attack.seed=1")

    summary = rollouts.finish(*attack, "guard.mode='off'")

    assert summary["final_weights_digest"] != clean["final_weights_digest"]
    assert learned(rollouts) != of(lines)


# a step is one of two that learn from the same texts: the second one's texts are in the state of the first
@pytest.mark.slow
@pytest.mark.parametrize("journal", ["true", "false"])
@pytest.mark.parametrize("step", [4, 5])
def test_an_owner_that_is_killed_goes_on_with_the_same_texts(rollouts, undisturbed, journal, step):
    clean, lines = undisturbed
    process = rollouts.train(f"checkpoint.journal={journal}")
    rollouts.wait_for(process, lambda: rollouts.has_line("metrics.jsonl", f'"step": {step},'))
    kill_owner(rollouts, process)

    summary = rollouts.finish(f"checkpoint.journal={journal}", resume=True)

    assert summary["resumed_from"] >= 3
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert learned(rollouts) == of(lines)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dr_grpo", "rloo"])
def test_an_owner_that_weighs_texts_in_another_way_goes_on_with_the_same_ones_too(tmp_path, kind):
    whole, killed = whole_and_killed(tmp_path, written, 5, learned, f"train.objective.kind='{kind}'")

    assert killed == whole


# adamw makes a step of its learning rate of a gradient that is nothing but rounding
SGD = ("optimizer.kind='sgd'", "optimizer.lr=0.1", "optimizer.weight_decay=0.0")


def assert_lines(found: list[list[Any]], expected: list[list[Any]], within: float = 1e-6) -> None:
    """Two runs have learned the same in every step, within rounding."""
    for one, two in zip(expected, found, strict=True):
        assert two == pytest.approx(one, rel=within, abs=within)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp = 2", "pp = 2", "cp = 2"])
@pytest.mark.parametrize("optimizer", [SGD, (PLAIN_EPS,), ()], ids=["sgd", "adamw-eps", "adamw"])
def test_ranks_write_and_learn_what_one_process_does(tmp_path, optimizer, layout):
    found = {}
    for name in ("dp = 1", layout):
        path = tmp_path / name.replace(" ", "")
        path.mkdir()
        place = written(make_place(path), f"\n[parallel]\n{name}\n")
        place.finish(*optimizer, "checkpoint.every=1", f"checkpoint.keep={STEPS}")
        lines = [line[: LEARNED.index("batch") + 1] for line in learned(place)]
        found[name] = lines, kept_state(path / "run", 1), kept_state(path / "run", STEPS)
        end_all(place)
    (lines, first, last), (one, first_of_one, last_of_one) = found[layout], found["dp = 1"]

    assert_lines(lines, one)
    if optimizer:
        assert_same_weights(last, last_of_one)
        return
    assert_same_first_step_of_adamw(first, first_of_one)
    assert_same_but_for_biases_of_keys(last, last_of_one)


def assert_same_but_for_biases_of_keys(
    last: dict[str, torch.Tensor], last_of_one: dict[str, torch.Tensor], within: float = WITHIN
) -> None:
    """Two states of GPT-2 under AdamW are one within rounding, but for that which AdamW has divided by itself.

    No output depends on a bias of keys, for it adds one number to all scores of a query. So its gradient is rounding,
    which the states themselves show, and AdamW makes steps of it.
    """
    assert_same_weights(last, last_of_one, DIVIDED)
    keys = {name: biases_of_keys(name, tensor) for name, tensor in last.items()}
    for state in (last, last_of_one):
        for name, mask in rounded_gradients(state).items():
            assert bool(mask[keys[f"weight/{name}"]].all()), name
    assert_same_weights(
        *({name: tensor[~keys[name]] for name, tensor in state.items()} for state in (last, last_of_one)), within
    )


def biases_of_keys(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor of GPT-2 has them, as a mask."""
    found = torch.zeros_like(tensor, dtype=torch.bool)
    if name.endswith("c_attn.bias"):
        found.chunk(3)[1].fill_(True)
    return found


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return float('nan')", "found nan, expected a finite number"),
        pytest.param("import time; time.sleep(600)", "took longer than rewards.timeout_s = 1", marks=pytest.mark.slow),
    ],
)
def test_a_reward_that_fails_ends_the_run_by_name(rollouts, body, said):
    own = Path(rollouts.path / "own.py")
    own.write_text(f"def reward(prompt, text, record):\n    {body}\n")
    process = rollouts.train("rewards.of=[{kind='own.py:reward'}]", "rewards.timeout_s=1.0")

    assert process.wait() == 6, process.text
    assert "rewards.of[0] (reward), draw 0, " in process.text
    assert "prompts.jsonl, line " in process.text
    assert said in process.text
    assert "[PHX-R040]" in process.text
    assert rollouts.summary()["status"] == "failed"


OWN = """
import pathlib

HOME = pathlib.Path("PLACE")


def reward(prompt, text, record):
    calls = HOME / "calls"
    done = int(calls.read_text()) if calls.exists() else 0
    calls.write_text(str(done + 1))
    # from the third draw on it fails, until what it needs is there
    return float("nan") if done >= 50 and not (HOME / "mended").exists() else float(len(text))
"""


@pytest.mark.slow
def test_a_run_whose_reward_was_mended_loses_nothing(tmp_path):
    found = {}
    for name in ("whole", "mended", "changed"):
        (tmp_path / name).mkdir()
        place = written(make_place(tmp_path / name))
        own, reward = place.path / "own.py", "rewards.of=[{kind='own.py:reward'}]"
        own.write_text(OWN.replace("PLACE", str(place.path)))
        if name == "whole":
            (place.path / "mended").touch()
            found[name] = place.finish(reward)["final_weights_digest"], learned(place)
            end_all(place)
            continue
        process = place.train(reward)
        assert process.wait() == 6, process.text
        assert "continue with --resume; with a function that was changed" in " ".join(process.text.split())
        if name == "mended":
            (place.path / "mended").touch()
            found[name] = place.finish(reward, "rewards.timeout_s=20.0", resume=True)["final_weights_digest"]
            assert learned(place) == found["whole"][1]
        else:
            own.write_text("def reward(prompt, text, record):\n    return float(len(text))\n")
            process = place.start(
                "train",
                str(place.run_file),
                "--set",
                reward,
                "--run-dir",
                str(place.path / "next"),
                "--from",
                str(place.path / "run"),
            )
            assert process.wait() == 0, process.text
            found[name] = place.summary("next")["final_weights_digest"]
        end_all(place)

    # the same rewards by other words are the same run
    assert found["mended"] == found["changed"] == found["whole"][0]
