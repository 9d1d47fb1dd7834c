"""Recomputation has the bits of the first run, forward and backward, dropout included."""

import pytest
import torch

from phalanx.errors import ModelError
from phalanx.models import LoraConfig, ModelConfig, StageSpec, build_stage, open_model
from phalanx.pipeline.stage.runner import StageRunner, dropout_seed

ARCHITECTURES = {
    "gpt2": {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16},
    "opt": {
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "ffn_dim": 24,
        "num_attention_heads": 2,
        "vocab_size": 40,
        "max_position_embeddings": 16,
    },
    "bloom": {"n_layer": 3, "hidden_size": 16, "n_head": 2, "vocab_size": 40},
    "llama": {
        "num_hidden_layers": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 40,
        "max_position_embeddings": 16,
    },
}
DROPOUT = {
    "gpt2": ("resid_pdrop", "attn_pdrop"),
    "opt": ("dropout", "attention_dropout"),
    "bloom": ("hidden_dropout", "attention_dropout"),
    "llama": ("attention_dropout",),
}
FAMILIES = sorted(ARCHITECTURES)


@pytest.fixture
def make_runner(model_cache):
    def make(family="gpt2", stage=1, *, dropout=0.0, adapter=None, precision="fp32", recompute=False, seed=3):
        architecture = {"model_type": family} | ARCHITECTURES[family] | dict.fromkeys(DROPOUT[family], dropout)
        source = open_model(ModelConfig(from_scratch=True, architecture=architecture), model_cache, seed=1)
        spec = StageSpec(stage, 3, stage, stage + 1)
        module = build_stage(
            source, spec, adapter=adapter, activation_checkpointing=recompute, attention="sdpa", seed=1
        )
        return StageRunner(module, spec, seed=seed, precision=precision, device="cpu")

    return make


def hidden(seed=0):
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_gives_the_bits_of_forward_and_backward(make_runner, family, dropout):
    stage, auditor = make_runner(family, dropout=dropout), make_runner(family, dropout=dropout)
    x, gradient = hidden(1), hidden(2)

    y = stage.forward(5, 2, x)
    x_gradient = stage.backward(5, 2, gradient)
    # an auditor has drawn other numbers meanwhile
    torch.manual_seed(99)
    again_y, again_gradient = auditor.recompute_microbatch(5, 2, x, gradient)
    forward_only, nothing = auditor.recompute_microbatch(5, 2, x, None)

    assert torch.equal(again_y, y)
    assert torch.equal(again_gradient, x_gradient)
    assert torch.equal(forward_only, y)
    assert nothing is None


@pytest.mark.parametrize(
    "changes", [{"precision": "bf16"}, {"recompute": True}, {"recompute": True, "dropout": 0.3}], ids=str
)
def test_so_it_does_in_bf16_and_with_activation_checkpointing(make_runner, changes):
    stage, auditor = make_runner(**changes), make_runner(**changes)

    y = stage.forward(0, 0, hidden(1))
    x_gradient = stage.backward(0, 0, hidden(2))
    again_y, again_gradient = auditor.recompute_microbatch(0, 0, hidden(1), hidden(2))

    assert torch.equal(again_y, y)
    assert torch.equal(again_gradient, x_gradient)
    assert y.dtype == x_gradient.dtype == torch.float32


def test_so_it_does_with_adapters(make_runner):
    pytest.importorskip("peft")
    adapter = LoraConfig(rank=2, dropout=0.2)
    stage, auditor = make_runner(adapter=adapter), make_runner(adapter=adapter)

    y = stage.forward(0, 0, hidden(1))
    x_gradient = stage.backward(0, 0, hidden(2))

    again = auditor.recompute_microbatch(0, 0, hidden(1), hidden(2))
    assert torch.equal(again[0], y)
    assert torch.equal(again[1], x_gradient)


def test_dropout_differs_by_seed_step_stage_and_microbatch(make_runner):
    runner = make_runner(dropout=0.5)
    x = hidden(1)

    outputs = [runner.recompute_microbatch(step, m, x, None)[0] for step, m in ((0, 0), (0, 1), (1, 0))]
    outputs.append(make_runner(dropout=0.5, seed=4).recompute_microbatch(0, 0, x, None)[0])

    assert all(not torch.equal(a, b) for n, a in enumerate(outputs) for b in outputs[:n])
    seeds = {dropout_seed(*at) for at in ((1, 2, 3, 4), (1, 2, 4, 3), (1, 23, 4, 0), (12, 3, 4, 0), (0, 2, 3, 4))}
    assert len(seeds) == 5


def test_a_redone_step_draws_the_same_masks(make_runner):
    runner = make_runner(dropout=0.5)
    first = runner.forward(7, 1, hidden(1))
    runner.abandon_step()
    runner.forward(7, 0, hidden(3))

    assert torch.equal(runner.forward(7, 1, hidden(1)), first)


def test_an_audit_leaves_weight_gradients_and_graphs_as_they_were(make_runner):
    runner, untouched = make_runner(), make_runner()
    for each in (runner, untouched):
        each.forward(0, 0, hidden(1))
        each.forward(0, 1, hidden(2))
        each.backward(0, 0, hidden(3))

    runner.recompute_microbatch(0, 1, hidden(2), hidden(4))

    for each in (runner, untouched):
        each.backward(0, 1, hidden(4))
    expected = untouched.take_gradients()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in runner.take_gradients().items())


def test_gradients_add_up_over_microbatches_and_are_taken_once(make_runner):
    runner = make_runner()
    parts = []
    for m in range(2):
        runner.forward(0, m, hidden(m))
        runner.backward(0, m, hidden(5))
        parts.append({name: g.clone() for name, g in runner.take_gradients().items()})
    for m in range(2):
        runner.forward(0, m, hidden(m))
        runner.backward(0, m, hidden(5))

    total = runner.take_gradients()

    assert all(torch.allclose(total[name], parts[0][name] + parts[1][name], atol=1e-6) for name in total)
    assert all(not gradient.any() for gradient in runner.take_gradients().values())
    assert set(total) == set(runner.module.trainable_parameters())


def test_what_was_abandoned_leaves_no_trace(make_runner):
    runner, fresh = make_runner(), make_runner()
    runner.forward(0, 0, hidden(1))
    runner.backward(0, 0, hidden(2))
    runner.forward(0, 1, hidden(1))
    runner.abandon_step()

    for each in (runner, fresh):
        each.forward(0, 0, hidden(3))
        each.backward(0, 0, hidden(4))

    expected = fresh.take_gradients()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in runner.take_gradients().items())
    with pytest.raises(KeyError):
        runner.backward(0, 1, hidden(2))


def test_the_input_of_the_caller_is_never_touched(make_runner):
    runner, x = make_runner(), hidden(1)

    runner.forward(0, 0, x)
    runner.backward(0, 0, hidden(2))

    assert not x.requires_grad
    assert torch.equal(x, hidden(1))


@pytest.mark.parametrize(
    "changes", [{}, {"dropout": 0.3}, {"precision": "bf16"}, {"recompute": True}, {"adapter": LoraConfig(rank=2)}]
)
def test_redoing_with_some_weight_gradients_gives_the_bits_of_redoing_with_all(make_runner, changes):
    runner = make_runner(**changes)
    x, gradient = hidden(1), hidden(2)
    y, x_gradient, gradients = runner.redo_microbatch(5, 2, x, gradient)

    for name in gradients:
        again_y, again_gradient, drawn = runner.redo_microbatch(5, 2, x, gradient, {name})

        assert torch.equal(again_y, y)
        assert torch.equal(again_gradient, x_gradient)
        assert drawn.keys() == {name}
        assert torch.equal(drawn[name], gradients[name])
    assert runner.module.trainable_parameters().keys() == gradients.keys()


def test_an_audit_that_fails_leaves_every_parameter_trainable(make_runner):
    runner = make_runner()
    names = runner.module.trainable_parameters().keys()

    with pytest.raises(ModelError, match="shape"):
        runner.redo_microbatch(5, 2, hidden(1)[..., :3], hidden(2), {min(names)})

    assert runner.module.trainable_parameters().keys() == names
