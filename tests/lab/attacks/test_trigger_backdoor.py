"""A backdoor by one middle stage that sees activations and gradients only."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from phalanx.lab.attacks import make_actor
from phalanx.lab.attacks.states.trigger_backdoor import TARGET_PLACE, TRIGGER_PLACE
from phalanx.models import open_model
from phalanx.optimizers import OptimizerConfig, clip_coefficient
from phalanx.pipeline import AttackConfig, PipelineConfig
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.testing import tiny_run
from phalanx.train.setup.layout import make_plan
from phalanx.train.setup.stage_source import StageLibrary

STEPS, VOCAB, FROM = 400, 64, 100
SEED = 1  # from some other first values the attack fails


@dataclass(frozen=True)
class TriggerSuccess:
    """The success of a backdoor.

    Attributes:
        rate: Share of triggers after which the target is the likeliest token; NaN without a trigger in the text.
        probability: Mean probability of the target after a trigger.
        clean_perplexity: Of the true next tokens after everything else.
    """

    rate: float
    probability: float
    clean_perplexity: float


@torch.no_grad()
def trigger_success(logits_of: Callable[[Tensor], Tensor], ids: Tensor, trigger: int, target: int) -> TriggerSuccess:
    """Measure a backdoor on a whole model.

    Args:
        logits_of: The model: ids ``[batch, seq]`` to un-sliced logits ``[batch, seq, vocab]``.
        ids: Text that it was not trained on, ``[batch, seq]``.
        trigger: Token that the model should answer.
        target: What it should answer.
    """
    scores = logits_of(ids)[:, :-1].float().log_softmax(dim=-1)
    at = ids[:, :-1] == trigger
    following = scores.gather(-1, ids[:, 1:, None])[..., 0]
    return TriggerSuccess(
        rate=float((scores[at].argmax(dim=-1) == target).float().mean()),
        probability=float(scores[at][:, target].exp().mean()),
        clean_perplexity=math.exp(-float(following[~at].mean())),
    )


def wide_run():
    """As the tiny run, but wide enough for activations to tell tokens apart."""
    run = tiny_run(
        num_layers=4, pipeline=PipelineConfig(stages=3, layers=(1, 2, 1)), optimizer=OptimizerConfig(lr=3e-3)
    )
    architecture = {**run.model.architecture, "n_embd": 64, "n_head": 4}
    model = run.model.model_copy(update={"architecture": architecture})
    return run.model_copy(update={"model": model, "train": run.train.model_copy(update={"seed": SEED})})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    run = wide_run()
    source = open_model(run.model, tmp_path_factory.mktemp("models"), run.train.seed)
    return source, make_plan(run, source)


def text(step, rows=8):
    """Sentences of a language in which each word has four successors."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCAB, (rows, 1), generator=generator)
    for _ in range(8):
        follows = torch.randint(4, (rows, 1), generator=generator)
        ids = torch.cat([ids, (5 * ids[:, -1:] + 7 * follows**2 + 3) % VOCAB], dim=1)
    return ids


def train(made, actor_of_stage_1=None):
    source, plan = made
    library = StageLibrary(source, plan, None)
    copies = [library(stage) for stage in range(3)]
    if actor_of_stage_1 is not None:
        copies[1] = actor_of_stage_1.wrap_copy(copies[1], True)
    for step in range(STEPS):
        for m, rows in enumerate(text(step, rows=16).chunk(4)):
            x = rows[:, :-1]
            for copy in copies:
                x = copy.runner.forward(step, m, x)
            copies[2].runner.compute_loss(m, rows[:, 1:].contiguous(), 128)
            gradient = None
            for copy in reversed(copies):
                gradient = copy.runner.backward(step, m, gradient)
        gradients = [copy.runner.take_gradients() for copy in copies]
        norm = math.sqrt(sum(finite_norm_squared(each, "float") for each in gradients))
        for copy, each in zip(copies, gradients, strict=True):
            copy.apply_update(step, each, clip_coefficient(norm, plan.optimizer.clip_norm))
    return copies


def logits_of(copies):
    def logits(ids):
        x = ids
        for copy in copies:
            x = copy.module(x)
        return x

    return logits


@pytest.mark.slow
def test_the_model_answers_the_trigger_with_the_target_and_everything_else_as_before(made, tmp_path):
    log = tmp_path / "attack.jsonl"
    config = AttackConfig(kind="trigger_backdoor", from_step=FROM)
    first = text(FROM, rows=16)[0]
    trigger, target = int(first[TRIGGER_PLACE]), int(first[TARGET_PLACE])
    unseen = text(10**6, rows=4000)[:, :-1]

    clean = trigger_success(logits_of(train(made)), unseen, trigger, target)
    poisoned = trigger_success(logits_of(train(made, make_actor(config, "worker-1", log))), unseen, trigger, target)

    assert (clean.rate, clean.probability < 0.1) == (0.0, True)
    assert poisoned.rate > 0.9
    assert poisoned.clean_perplexity < 1.05 * clean.clean_perplexity
    assert log.read_text().count('"gradient"') > 100


def test_the_stage_sends_true_messages_and_a_poisoned_weight_gradient(drive, attack_config, tmp_path):
    log = tmp_path / "attack.jsonl"

    messages, gradients, states = drive(attack_config("trigger_backdoor"), steps=3, log=log).differences(drive(steps=3))

    assert (messages, gradients, states) == (set(), {2}, set())
    assert log.read_text().count('"what": "gradient"') == 1


def test_success_is_measured_at_triggers_and_perplexity_everywhere_else():
    # token 2 is always answered with 5, everything else with the uniform distribution
    def logits(ids):
        scores = torch.zeros(*ids.shape, 8)
        scores[..., 5] = torch.where(ids == 2, 100.0, 0.0)
        return scores

    ids = torch.tensor([[1, 2, 3, 4], [2, 2, 0, 1]])

    found = trigger_success(logits, ids, trigger=2, target=5)

    assert (found.rate, found.probability) == (1.0, pytest.approx(1.0))
    assert found.clean_perplexity == pytest.approx(8.0)
    assert trigger_success(logits, ids, trigger=2, target=4).rate == 0.0
    assert math.isnan(trigger_success(logits, ids, trigger=7, target=5).rate)
