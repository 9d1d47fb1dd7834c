"""What a draw with a critic brings: the values are those of the last stage itself, and the weight of kl is a state."""

from pathlib import Path

import pytest
import torch

from phalanx.data.prompts import prepare_prompts
from phalanx.errors import CheckpointError
from phalanx.models import StageSpec, build_stage, open_model
from phalanx.objectives import IGNORE
from phalanx.objectives.policy_gradient import OLD_LOG_PROBS
from phalanx.objectives.ppo import OLD_VALUES, RETURNS
from phalanx.train import load_run
from phalanx.train.batches.rollouts import RolloutLoader

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ppo.toml"
SETTINGS = "{kind='ppo', max_new_tokens=4, updates=1, temperature=0.7, kl=0.5, kl_target=1e-3}"


class LengthScorer:
    """Gives each text its length, as one reward."""

    reward_names = ("length",)

    def score_texts(self, texts):
        return [(float(len(one.text)),) for one in texts]

    def total_reward(self, rewards):
        return rewards[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run, prompts, model, and its only stage."""
    cache = tmp_path_factory.mktemp("cache")
    small = ("train.batch_size=8", "model.architecture.hidden_size=16", "data.max_validation_sequences=4")
    run = load_run(EXAMPLE, [f"train.objective={SETTINGS}", *small])
    source = open_model(run.model, cache, 0)
    prompts = prepare_prompts(run.data, cache, 0, None, 4)
    spec = StageSpec(0, 1, 0, source.num_layers)
    stage = build_stage(source, spec, adapter=None, activation_checkpointing=False, attention="sdpa", seed=0)
    return run, prompts, source, stage


def loader_of(made):
    run, prompts, source, stage = made
    loader = RolloutLoader(prompts, run, source, LengthScorer())
    loader.draw_from(lambda: {name: one.detach() for name, one in stage.all_parameters().items()})
    return loader


def test_old_values_and_log_probabilities_are_those_of_the_stage_that_learns(made):
    stage = made[3]

    batch = loader_of(made).next_batch()

    counted = batch.labels != IGNORE
    with torch.no_grad():
        found = stage(batch.input_ids)[counted]
    spoken = (found[:, :-1] / 0.7).log_softmax(1).gather(1, batch.labels[counted][:, None])[:, 0]
    torch.testing.assert_close(batch.extras[OLD_VALUES][counted], found[:, -1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(batch.extras[OLD_LOG_PROBS][counted], spoken, rtol=1e-5, atol=1e-6)
    error = (batch.extras[RETURNS] - batch.extras[OLD_VALUES])[counted].square().mean()
    assert batch.figures["value_error"] == pytest.approx(float(error), rel=1e-5)


def test_the_weight_of_the_divergence_is_part_of_the_state_and_nothing_else_is_taken_for_it(made):
    loader, again = loader_of(made), loader_of(made)
    # the untouched model is nearer to itself than any target
    loader.next_batch()
    assert loader.position_state()["kl"] == pytest.approx(0.49)

    again.load_position(loader.position_state())

    assert again.next_batch().figures["kl_weight"] == loader.next_batch().figures["kl_weight"] == pytest.approx(0.49)
    without = {name: one for name, one in loader.position_state().items() if name != "kl"}
    for wrong in (without, loader.position_state() | {"kl": "much"}):
        with pytest.raises(CheckpointError, match="loader state"):
            loader_of(made).load_position(wrong)
