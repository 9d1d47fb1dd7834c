"""PPO in real runs: critic and policy in one verified step; no liar leaves a trace, a killed owner goes on the same."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from real_runs import Place, end_all, make_place
from test_crashes import kill_owner
from test_rollout_runs import PIPELINE, SGD, STEPS, assert_lines, assert_same_but_for_biases_of_keys, written

from kept_states import PLAIN_EPS, assert_same_first_step_of_adamw, assert_same_weights, kept_state
from phalanx.telemetry import read_metrics

PPO = """
[train.objective]
kind = "ppo"
max_new_tokens = 4
updates = 2
kl = 0.05
kl_target = 1.0
entropy = 0.01
value_weight = 0.5
"""
GRPO = """
[train.objective]
kind = "grpo"
group = 4
max_new_tokens = 4
updates = 2
kl = 0.05
"""
LEARNED = ("reward", "kl", "kl_weight", "value_error", "text_tokens", "texts_ended", "batch", "loss", "grad_norm")
ATTACK = ("attack.stages=[1]", "attack.rate=0.3", "attack.seed=1")


def with_critic(place: Place, engine: str = PIPELINE) -> Place:
    written(place, engine)
    run = place.run_file.read_text().replace(GRPO, PPO)
    assert PPO in run
    place.run_file.write_text(run.replace("[model]\n", '[model]\nhead = "lm_and_score"\n', 1))
    return place


def learned(place: Place) -> list[list[Any]]:
    lines = read_metrics(place.path / "run" / "metrics.jsonl")
    return [[line["step"], *(line[name] for name in LEARNED)] for line in lines]


@pytest.fixture
def critic(place: Place) -> Place:
    return with_critic(place)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], list[list[Any]]]]:
    """Summary and what was learned in the run in which nothing goes wrong."""
    place = with_critic(make_place(tmp_path_factory.mktemp("undisturbed")))
    yield place.finish(), learned(place)
    end_all(place)


@pytest.mark.slow
def test_values_and_the_weight_of_the_divergence_are_in_the_metrics(undisturbed):
    summary, lines = undisturbed
    divergence, kl_weight, errors = ([line[1 + LEARNED.index(name)] for line in lines] for name in LEARNED[1:4])

    assert (summary["status"], summary["steps"]) == ("completed", STEPS)
    # two steps learn from one draw; the untouched model is the reference itself, and its weight falls by a fiftieth
    assert divergence[0] == pytest.approx(0.0, abs=1e-5)
    assert kl_weight[:4] == pytest.approx([0.05, 0.05, 0.049, 0.049])
    assert errors[0] > 0.0
    assert errors[0] == errors[1] != errors[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sign_flip", "gaussian"])
def test_a_liar_is_named_in_its_first_step_and_is_in_no_value_and_no_weight(critic, undisturbed, kind):
    clean, lines = undisturbed

    summary = critic.finish(f"attack.kind='{kind}'", *ATTACK)

    assert summary["attacks_injected"] == summary["detections"] == 1
    assert (summary["evicted"], summary["false_accusations"]) == (["worker-1"], 0)
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert learned(critic) == lines


# the defence is off, and the liar wins
@pytest.mark.slow
def test_without_a_guard_a_liar_bends_values_and_weights(critic, undisturbed):
    clean, lines = undisturbed

    summary = critic.finish("attack.kind='sign_flip'", *ATTACK, "guard.mode='off'")

    assert summary["final_weights_digest"] != clean["final_weights_digest"]
    assert learned(critic) != lines


# step 4 is the first of two that learn from one draw, with the weight of the divergence that belongs to it
@pytest.mark.slow
@pytest.mark.parametrize(("journal", "step"), [("true", 4), ("false", 5)])
def test_an_owner_that_is_killed_goes_on_with_the_same_values_and_the_same_weight(critic, undisturbed, journal, step):
    clean, lines = undisturbed
    process = critic.train(f"checkpoint.journal={journal}")
    critic.wait_for(process, lambda: critic.has_line("metrics.jsonl", f'"step": {step},'))
    kill_owner(critic, process)

    summary = critic.finish(f"checkpoint.journal={journal}", resume=True)

    assert summary["resumed_from"] >= 3
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    assert learned(critic) == lines


@dataclass(frozen=True)
class Ranks:
    """What ranks learn, up to the numbers of a step's batch, and what they keep of the first and of the last step."""

    lines: list[list[Any]]
    first: dict[str, torch.Tensor]
    last: dict[str, torch.Tensor]


def by_ranks(path: Path, layout: str, *optimizer: str) -> Ranks:
    path.mkdir()
    place = with_critic(make_place(path), f"\n[parallel]\n{layout}\n")
    place.finish(*optimizer, "checkpoint.every=1", f"checkpoint.keep={STEPS}")
    run = place.path / "run"
    lines = [line[: LEARNED.index("batch") + 1] for line in learned(place)]
    end_all(place)
    return Ranks(lines, kept_state(run, 1), kept_state(run, STEPS))


@pytest.fixture(scope="module")
def by_one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ranks]:
    """One process under an optimizer; trained once for each."""
    home = tmp_path_factory.mktemp("ranks")
    return functools.cache(lambda *optimizer: by_ranks(home / str(len(optimizer)), "dp = 1", *optimizer))


LAYOUTS = pytest.mark.parametrize("layout", ["dp = 2", "pp = 2", "cp = 2"])


@pytest.mark.slow
@LAYOUTS
@pytest.mark.parametrize("optimizer", [SGD, (PLAIN_EPS,)], ids=["sgd", "adamw-eps"])
def test_ranks_expect_and_learn_what_one_process_does(by_one_process, tmp_path, layout, optimizer):
    one = by_one_process(*optimizer)

    other = by_ranks(tmp_path / "ranks", layout, *optimizer)

    assert_lines(other.lines, one.lines)
    assert_same_weights(other.last, one.last)


@pytest.mark.slow
@LAYOUTS
def test_under_adamw_ranks_have_the_gradient_of_one_process_and_its_weights_but_for_divided_rounding(
    by_one_process, tmp_path, layout
):
    one = by_one_process()

    other = by_ranks(tmp_path / "ranks", layout)

    assert_same_first_step_of_adamw(other.first, one.first)
    # of 51,552 others 60 were more than 1e-6 away on one machine and 2 on another, by 1.2e-5 at most: one of their ten
    # gradients was small
    assert_same_but_for_biases_of_keys(other.last, one.last, 2e-5)
    assert_lines(other.lines, one.lines, 1e-5)


def test_a_model_without_a_critic_is_refused_by_name(critic):
    process = critic.train("model.head='lm'")

    assert process.wait() == 2, process.text
    assert 'needs "lm_and_score"; set model.head = "lm_and_score"' in " ".join(process.text.split())
