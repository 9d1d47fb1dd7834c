"""Sampled texts as batches and as states: each number beside its token, and nothing malformed is gone on from."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from phalanx.config import canonical_json, config_of
from phalanx.engine import GuardReport, StepResult
from phalanx.errors import CheckpointError, ConfigError, StaleRolloutsError
from phalanx.objectives import IGNORE
from phalanx.objectives.policy_gradient import DrawnTexts
from phalanx.rollouts import Rollout
from phalanx.train import RUN_TYPES
from phalanx.train.batches.rollouts import LearnedRow, RolloutLoader, batch_of, check_fresh

ROWS = [
    LearnedRow((5, 6, 7), (8, 9), {"advantages": (0.5, 0.25)}),
    LearnedRow((4,), (3, 2, 1), {"advantages": (-1.0,) * 3}),
]


def test_every_number_stands_at_the_place_that_predicts_its_token():
    batch = batch_of(ROWS, (10, 11), 6, 0)

    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 0, 0], [4, 3, 2, 0, 0, 0]]
    assert batch.labels.tolist() == [[IGNORE, IGNORE, 8, 9, IGNORE, IGNORE], [3, 2, 1, IGNORE, IGNORE, IGNORE]]
    assert batch.extras["advantages"].tolist() == [[0, 0, 0.5, 0.25, 0, 0], [-1, -1, -1, 0, 0, 0]]
    assert (batch.indices, batch.extras["advantages"].dtype) == ((10, 11), torch.float32)


def test_a_row_that_was_saved_is_the_same_row():
    assert [LearnedRow.from_json(row.to_json()) for row in ROWS] == ROWS


UNREAD = {"workers": 1, "check": {"unread_weight": 0.5}}


def run_of(**sections):
    data = {
        "model": {"from_scratch": True, "architecture": {"model_type": "gpt2", "vocab_size": 300}},
        "data": {"prompts": "a.jsonl", "tokenizer": {"kind": "bpe"}, "sequence_length": 8},
        "train": {"steps": 4, "batch_size": 8, "microbatches": 2, "objective": {"kind": "grpo", "group": 4}},
        "rewards": {"of": [{"kind": "exact"}]},
        "optimizer": {"lr": 1e-3},
    }
    for name, keys in sections.items():
        data[name] = {**data.get(name, {}), **keys} if keys is not None else data.pop(name) and None
    return config_of({name: one for name, one in data.items() if one is not None}, Path("run.toml"), RUN_TYPES)


class FakePrompts:
    """Ten prompts of which the loader needs no more than their number."""

    digest, num_train_sequences, held_out = "0" * 64, 10, ()


def loader():
    return RolloutLoader(FakePrompts(), run_of(), None, None)


@pytest.mark.parametrize(
    "change",
    [
        {"draws": "3"},
        {"kept": {"rows": [{"prompt": [1]}], "indices": [0], "used": 1, "figures": {}}},
        {"kept": {"rows": [], "indices": ["a"], "used": 1, "figures": {}}},
        {"kept": 7},
        {"more": 1},
    ],
)
def test_a_malformed_state_is_refused(change):
    with pytest.raises(CheckpointError, match="loader state"):
        loader().load_position(loader().position_state() | change)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"rewards": None}, r"learns from texts of the model and needs \[rewards\]; add it"),
        ({"train": {"objective": "causal_lm"}}, "does not use data.prompts; remove it"),
        ({"train": {"batch_size": 6}}, "is not a multiple of train.objective.group = 4"),
        ({"train": {"steps": 0, "epochs": 1.0}}, "set train.steps"),
        ({"model": {"adapter": {"rank": 2}}}, "model.adapter: texts are generated without adapters"),
        (
            {"parallel": {"cp": 2}, "train": {"objective": {"kind": "rloo", "group": 4, "max_new_tokens": 4}}},
            'parallel.cp = 2 divides rows, but train.objective = "rloo" needs whole rows',
        ),
        (
            {"rollouts": UNREAD, "train": {"objective": {"kind": "ppo", "group": 4}}},
            'unread_weight: the critic of train.objective = "ppo" learns from every text alike; set it to 1.0',
        ),
        (
            {"rollouts": UNREAD, "train": {"objective": {"kind": "grpo", "group": 4, "kl": 0.1}}},
            'unread_weight: train.objective.kl = 0.1 is a loss of its own in "grpo"',
        ),
        ({"rollouts": {**UNREAD, "check": {"rate": 0.0, "unread_weight": 0.5}}}, "and rate = 0 reads none"),
        ({"guard": {"commit_lag": 1}}, "guard.commit_lag = 1: texts are generated with verified weights only"),
    ],
)
def test_what_does_not_go_with_rollouts_is_refused_by_name(sections, said):
    with pytest.raises(ConfigError, match=said):
        run_of(**sections)


def test_texts_keep_their_weight_on_the_way_to_what_is_learned():
    texts = [
        Rollout(0, n, (1,), (2, 3), "length", np.zeros(2, np.float32), np.zeros((1, 8), np.float32), weight=weight)
        for n, weight in enumerate((1.0, 0.25, 1.0, 1.0))
    ]
    whole = [replace(text, weight=1.0) for text in texts]

    weighed, usual = (loader()._make_drawn_texts(each, [0.0, 1.0, 0.0, 0.0]) for each in (texts, whole))

    assert weighed.weights.tolist() == [1.0, 0.25, 1.0, 1.0]
    assert usual.weights is None


@pytest.mark.parametrize(("precision", "narrow"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_texts_are_written_in_the_precision_that_learns_from_them(precision, narrow):
    run = run_of(parallel={"dp": 1}, train={"precision": precision})

    with RolloutLoader(FakePrompts(), run, None, None)._autocast_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == narrow


def test_a_draw_of_one_text_can_be_saved():
    text = Rollout(0, 0, (1,), (2, 3), "length", np.zeros(2, np.float32), np.zeros((1, 8), np.float32))
    run = run_of(train={"batch_size": 1, "microbatches": 1, "objective": {"kind": "ppo", "group": 1}})
    models, scorer = SimpleNamespace(with_head=lambda kind: None), SimpleNamespace(reward_names=("exact",))
    drawn = DrawnTexts(torch.ones(1).double(), torch.ones(1, 2).bool(), *torch.zeros(2, 1, 2), 0.0, torch.zeros(1, 2))
    settings = run.train.objective

    figures = RolloutLoader(FakePrompts(), run, models, scorer)._sum_up_draw(
        [text], drawn, [[1.0]], settings.extra_columns(drawn)
    )

    assert figures["reward_std"] == 0.0
    assert json.loads(canonical_json(figures)) == figures


def test_a_step_after_undone_ones_is_not_kept():
    done = {
        "step": 5,
        "loss": 0.0,
        "num_targets": 1,
        "gradient_norm": 0.0,
        "phases": {},
        "bytes_by_link": {},
        "batch": "",
    }

    check_fresh(StepResult(**done, guard=None))
    check_fresh(StepResult(**done, guard=GuardReport(attempts=2)))
    with pytest.raises(StaleRolloutsError, match="step 5: 2 steps before it were undone"):
        check_fresh(StepResult(**done, guard=GuardReport(steps_redone=2)))
