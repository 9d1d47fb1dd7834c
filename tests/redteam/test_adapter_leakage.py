"""Adapter gradients give the tokens of a small batch away; sealed, masked, mixed or noised ones do not."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from phalanx.errors import ModelError, ReleaseRefusedError
from phalanx.models import LoraConfig, StageSpec, build_stage
from phalanx.redteam.inversion import SpanCheck, layer_inputs, precision_and_recall
from phalanx.redteam.inversion.span_check import outside_of_rows
from phalanx.redteam.inversion.wires import MaskedWire, SealedWire
from phalanx.security.seal import Purpose, ReleaseGate, ReleasePolicy, ReleaseRequest
from privacy_lab import VOCAB, text, tiny_model

RANK = 16
LAYER = "v_proj"
BATCH = text(1, seed=4, seq=8)
MANY = text(8, seed=5, seq=12)


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("adapters"))


@pytest.fixture
def stage(source):
    """The whole model, with an adapter on the values."""
    adapter = LoraConfig(rank=RANK, targets=(LAYER,))
    spec = StageSpec(0, 1, 0, source.num_layers)
    return build_stage(source, spec, adapter=adapter, activation_checkpointing=False, attention="sdpa", seed=1)


@pytest.fixture
def check(stage):
    every = torch.arange(VOCAB)[:, None]
    return SpanCheck(layer_inputs(stage, LAYER, every).transpose(0, 1))


def adapter_of(stage):
    """The adapter of the first block."""
    named = stage.trainable_parameters()
    a, b = (next(named[name] for name in named if name.endswith(f"lora_{side}.weight")) for side in "AB")
    return SimpleNamespace(a=a, b=b)


def train(stage, ids, lr=1.0):
    """One plain step on next tokens; returns the gradients that it was made with."""
    stage.zero_grad()
    cross_entropy(stage(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    adapter = adapter_of(stage)
    gradients = SimpleNamespace(a=adapter.a.grad.clone(), b=adapter.b.grad.clone(), weight=adapter.a.detach().clone())
    with torch.no_grad():
        for parameter in stage.trainable_parameters().values():
            parameter.sub_(lr * parameter.grad)
    return gradients


def test_the_first_gradient_of_an_adapter_gives_the_tokens_away(stage, check):
    seen = train(stage, BATCH)

    (found,) = check.tokens_by_position(seen.a, seen.b, seen.weight)

    assert float(seen.a.abs().max()) == 0.0
    precision, recall = precision_and_recall(found, BATCH[:, :-1])
    assert precision >= 0.8
    assert recall >= 0.8


def test_later_gradients_of_an_adapter_give_the_tokens_away(stage, check):
    train(stage, MANY)
    seen = train(stage, BATCH)

    (found,) = check.tokens_by_position(seen.a, seen.b, seen.weight)

    precision, recall = precision_and_recall(found, BATCH[:, :-1])
    assert precision >= 0.8
    assert recall >= 0.8


@pytest.mark.parametrize("wire", [SealedWire(Purpose.ADAPTER), MaskedWire()], ids=["sealed", "masked"])
def test_sealed_and_masked_gradients_of_an_adapter_give_no_token_away(wire, stage, check):
    train(stage, MANY)
    seen = train(stage, BATCH)

    (found,) = check.tokens_by_position(wire.host_view(seen.a), wire.host_view(seen.b), seen.weight)

    assert found.numel() == 0


def test_more_tokens_than_the_adapters_rank_hide_each_other_from_this_check(stage, check):
    train(stage, BATCH)
    seen = train(stage, MANY)

    assert [found.numel() for found in check.tokens_by_position(seen.a, seen.b, seen.weight)] == [0]


def test_two_releases_with_one_clients_step_between_them_give_its_tokens_away(stage, check):
    train(stage, MANY)
    before = adapter_of(stage).a.detach().clone()
    train(stage, BATCH)

    (found,) = check.tokens_of_update(before, adapter_of(stage).a.detach())

    assert precision_and_recall(found, BATCH[:, :-1])[1] >= 0.8


def test_what_the_release_policy_lets_out_gives_no_token_away(stage, check):
    policy = ReleasePolicy(min_clients=3, clip_norm=1.0, noise_multiplier=0.1)
    gate = ReleaseGate(policy)
    train(stage, MANY)
    before = adapter_of(stage).a.detach().clone()

    train(stage, BATCH)
    gate.note_contribution("client-1", 1)
    one = adapter_of(stage).a.detach() - before
    with pytest.raises(ReleaseRefusedError, match="1 clients"):
        gate.permit_release(ReleaseRequest(float(one.norm().clamp(max=1.0)), noise_std=0.1))

    for number in (2, 3, 4):
        train(stage, text(2, seed=10 + number))
        gate.note_contribution(f"client-{number}", 2)
    update = adapter_of(stage).a.detach() - before
    update = update * min(1.0, policy.clip_norm / float(update.norm()))
    noise = 0.1 * torch.randn(update.shape, generator=torch.Generator().manual_seed(0))
    gate.permit_release(ReleaseRequest(float(update.norm()) * (1 - 1e-6), noise_std=0.1))

    for released in (update, update + noise):
        (found,) = check.tokens_of_update(before, before + released)
        assert found.numel() == 0


def test_a_gradient_that_is_zero_not_finite_or_spans_everything_tells_nothing():
    candidates = torch.eye(3)

    for gradient in (torch.zeros(2, 3), torch.full((2, 3), float("nan")), torch.eye(3)):
        assert outside_of_rows(gradient, candidates).tolist() == [1.0, 1.0, 1.0]


def test_the_share_outside_of_a_row_space_is_the_sine_of_the_angle():
    outside = outside_of_rows(torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0], [3.0, 4.0, 0.0]]))

    assert outside.tolist() == pytest.approx([0.0, 0.8], abs=1e-6)


def test_a_layer_that_is_not_there_is_refused(stage):
    with pytest.raises(ModelError, match="block 0 has none of that name"):
        layer_inputs(stage, "c_attn", BATCH)
