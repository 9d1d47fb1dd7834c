"""Routers of a mixture of experts learn their own losses, wherever the stages end, and a guard recomputes them."""

import pytest
import torch
from planned_models import MIXTURES, PLANNED
from tiny_models import LAYERS, VOCAB, build_all, chain, named, some_ids, with_own_memory
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from phalanx.errors import ModelError
from phalanx.models import ModelConfig, ModelSource, open_model, parse_hub_config
from phalanx.models.source import write_random_model
from phalanx.planner.model.read import shape_of

SHARE, WEIGHT = 0.5, 0.25
ASKED = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
MIXTURE = PLANNED["qwen3_moe"] | ASKED


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def source_of(cache, **changes):
    return open_model(ModelConfig(from_scratch=True, architecture=MIXTURE | changes), cache, seed=3)


def whole_gradients(source, ids, share):
    """Gradients of transformers' whole model, with the loss of each router as transformers has it of one layer."""
    model = AutoModelForCausalLM.from_pretrained(source.directory, dtype=torch.float32, local_files_only=True)
    with_own_memory(model).train()
    found = model(input_ids=ids, use_cache=False, output_router_logits=True)
    total = model.loss_function(found.logits, ids, vocab_size=VOCAB)
    for logits in found.router_logits:
        total = total + load_balancing_loss_func((logits,), 4, 2) * (WEIGHT * share / LAYERS)
    total.backward()
    return found.logits, {name: p.grad for name, p in model.named_parameters()}, model.loss_function


def mixture_of(name, cache):
    hub_config = parse_hub_config(PLANNED[name] | ASKED, name)
    return ModelSource(write_random_model(hub_config, 3, cache, None))


@pytest.mark.quick_cases("*-3-False", "qwen3_moe-4-True")
@pytest.mark.parametrize(
    ("name", "num_stages", "recompute"),
    [("qwen3_moe", count, recompute) for count in range(1, LAYERS + 1) for recompute in (False, True)]
    + [(name, 3, False) for name in MIXTURES if name != "qwen3_moe"],
)
def test_gradients_with_the_losses_of_all_routers_are_the_whole_models(cache, name, num_stages, recompute):
    source, ids = mixture_of(name, cache), some_ids()
    logits, expected, loss = whole_gradients(source, ids, SHARE)
    stages = build_all(source, num_stages, recompute=recompute)
    for stage in stages:
        stage.router_share = SHARE

    found = chain(stages, ids)
    loss(found, ids, vocab_size=VOCAB).backward()

    assert torch.equal(found, logits)
    for name, parameter in named(stages).items():
        assert torch.equal(parameter.grad, expected[name]), name
    plain = whole_gradients(source, ids, 0.0)[1]
    gates = [name for name in plain if name.endswith("mlp.gate.weight")]
    assert len(gates) == LAYERS
    assert all(not torch.equal(plain[name], expected[name]) for name in gates)


def test_a_config_that_asks_for_no_router_loss_gets_none(cache):
    source, ids = source_of(cache, output_router_logits=False), some_ids()
    _, expected, loss = whole_gradients(source, ids, 0.0)
    stages = build_all(source, 2)
    for stage in stages:
        stage.router_share = SHARE

    loss(chain(stages, ids), ids, vocab_size=VOCAB).backward()

    assert all(torch.equal(parameter.grad, expected[name]) for name, parameter in named(stages).items())


@pytest.mark.parametrize("name", MIXTURES)
def test_all_experts_are_counted(cache, name):
    source = mixture_of(name, cache)
    whole = build_all(source, 1)[0]

    assert shape_of(source.hub_config_dict).num_parameters == sum(p.numel() for p in whole.parameters())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 of num_experts 4"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
    ],
)
def test_what_stages_cannot_carry_is_refused_by_name(cache, change, said):
    with pytest.raises(ModelError, match=said):
        source_of(cache, **change)
