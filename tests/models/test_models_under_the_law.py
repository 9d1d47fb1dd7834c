"""Models and objectives under the law: what they compute is what torch computes, to its rounding."""

import pytest
import torch
from planned_models import PLANNED
from tiny_models import ARCHITECTURES

from phalanx.errors import ModelError
from phalanx.exact import ExactArithmetic
from phalanx.models import StageSpec
from phalanx.models.build import build_empty_stage
from phalanx.models.families import FAMILIES, hub_config_dict, parse_hub_config
from phalanx.objectives import OBJECTIVES, objective_of
from phalanx.planner.model.families import FAMILIES as FACTS

QUICK = ("llama", "gpt2", "bloom", "falcon", "gemma2")
MODELS = ARCHITECTURES | PLANNED
VOCAB, ROWS, TOKENS = 61, 2, 6


def tiny_stage(name):
    config = parse_hub_config(MODELS[name], "test")
    layers = FAMILIES[config.model_type].num_layers(config)
    stage = build_empty_stage(
        hub_config_dict(config),
        StageSpec(0, 1, 0, layers),
        adapter=None,
        activation_checkpointing=False,
        attention="eager",
    ).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in stage.parameters():
        parameter.detach().uniform_(-0.3, 0.3, generator=generator)
    return stage


def learn(stage, ids):
    loss, _ = OBJECTIVES["causal_lm"](stage(ids), ids, {})
    gradients = torch.autograd.grad(loss, [p for p in stage.parameters() if p.requires_grad], allow_unused=True)
    return loss.detach(), [gradient for gradient in gradients if gradient is not None]


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in MODELS
        if FACTS[MODELS[name]["model_type"]].experts is None
    ],
)
def test_a_family_under_the_law_learns_what_it_learns_in_float32(name):
    stage, ids = tiny_stage(name), torch.arange(2 * 8).view(2, 8) * 7 % VOCAB
    loss, gradients = learn(stage, ids)
    with ExactArithmetic("exact", stage.parameters()) as law:
        stage.family.restore_buffers(stage.trunk, stage.hub_config)
        exact_loss, exact_gradients = learn(stage, ids)
    with law:
        again, _ = learn(stage, ids)

    assert torch.allclose(loss, exact_loss, rtol=2e-5)
    assert torch.equal(exact_loss, again)
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert float((gradient - exact_gradient).norm()) <= 2e-4 * float(gradient.norm()) + 1e-5


def test_experts_are_refused_by_the_operator_that_has_no_law():
    stage = tiny_stage(next(name for name in MODELS if MODELS[name]["model_type"] == "qwen3_moe"))

    with ExactArithmetic("exact"), pytest.raises(ModelError, match=r"aten\.\S+ has no law"):
        stage(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_an_objective_under_the_law_has_the_loss_and_gradient_of_float32(name):
    objective, generator = objective_of(name), torch.Generator().manual_seed(3)
    width = {"lm": VOCAB, "score": 1, "lm_and_score": VOCAB + 1}[objective.head]
    logits = torch.rand(ROWS, TOKENS, width, generator=generator) * 6 - 3
    labels = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=generator)
    labels[:, -1] = -100
    if name == "classification":
        labels = torch.full_like(labels, -100).index_fill_(1, torch.tensor([TOKENS - 1]), 3)
    extras = {}
    for key, rows in objective.extras.items():
        shape = (ROWS, TOKENS) if rows.per_token else (ROWS,)
        drawn = torch.rand(shape, generator=generator)
        extras[key] = (drawn > 0.5).long() if rows.dtype == "int64" else -drawn

    def learn_objective():
        x = logits.clone().requires_grad_()
        loss, _ = objective(x, labels, extras)
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    loss, gradient = learn_objective()
    with ExactArithmetic("exact"):
        exact_loss, exact_gradient = learn_objective()

    assert torch.allclose(loss, exact_loss, rtol=1e-5, atol=1e-5)
    assert torch.allclose(gradient, exact_gradient, rtol=1e-4, atol=1e-5)
