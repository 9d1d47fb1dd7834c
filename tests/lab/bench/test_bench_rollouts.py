"""The bench of verified rollouts counts what it says: honest workers are not accused, and a liar is found."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from phalanx.lab.bench.alone.rollouts import RolloutPolicies, measure_attack, measure_honest
from phalanx.rollouts import RolloutPolicy

STEP_LR = 1e-3


@pytest.fixture(scope="module")
def policies():
    """Two policies of a tiny model, one update apart, and bytes to cut prompts from."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=96,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        before = RolloutPolicy.from_model(LlamaForCausalLM(config))
    moved = {name: one + STEP_LR * one.sign() for name, one in before.tensors.items()}
    text = torch.randint(1, 256, (4000,), generator=torch.Generator().manual_seed(0))
    return RolloutPolicies(RolloutPolicy(before.config, moved), before, text)


@pytest.mark.slow
def test_honest_texts_are_read_by_three_classes_and_accuse_nobody(policies):
    rows, cost = measure_honest(policies, 4096)

    assert [row["accused"] for row in rows] == [0, 0, 0]
    assert len({row["checker"] for row in rows}) == 3
    assert 10.0 <= cost["bytes_per_token"] <= 10.5
    # a drawn eighth by the policy of now, and one text of the 64 of each answer by the policy before
    assert cost["share_of_writing"] == pytest.approx(cost["share_of_writing_if_all_is_read"] * (1 / 8 + 1 / 64))


def test_a_copied_text_is_found_in_each_text_but_the_first_of_its_prompt(policies):
    careless, careful = measure_attack(policies, "copied_text", 1, STEP_LR)

    for row in (careless, careful):
        assert row["texts"] == 64
        assert row["texts_that_differ"] == row["texts_found"] == 7 / 8
        assert row["answers_found"] == 1.0


def test_an_invented_reward_has_nothing_to_make_good(policies):
    (row,) = measure_attack(policies, "invented_reward", 1, STEP_LR)

    assert (row["way"], row["offences"], row["texts_found"]) == ("careless", ["reward"], 1.0)
