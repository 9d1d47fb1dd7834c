"""Packed layers compute torch's products, with the same bits for a row in any company, and leave adapters alone."""

import pytest
import torch
from torch import nn

from phalanx.serve.engine import packed
from phalanx.serve.engine.packed import PackedLinear, pack_model


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if packed.can_multiply_bfloat16() else [])])
def test_a_packed_layer_computes_the_product_of_torch(dtype, bias):
    layer = nn.Linear(96, 40, bias=bias, dtype=dtype)
    inputs = torch.randn(2, 7, 96, dtype=dtype)

    output = PackedLinear(layer.weight, layer.bias)(inputs)

    assert output.dtype == dtype
    assert torch.allclose(output.float(), layer(inputs).float(), atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_a_row_has_the_same_bits_among_four_rows_and_more():
    layer = nn.Linear(576, 192)
    multiply = PackedLinear(layer.weight, layer.bias)
    inputs = torch.randn(80, 576)
    whole = multiply(inputs)

    assert all(torch.equal(multiply(inputs[:rows].clone()), whole[:rows]) for rows in range(4, 80))


def test_all_layers_of_a_model_are_packed_and_their_weights_freed():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)))
    inputs = torch.randn(3, 8)
    expected = model(inputs)

    assert pack_model(model) == 2

    assert torch.allclose(model(inputs), expected, atol=1e-5)
    assert not list(model.parameters())


def test_factors_of_adapters_and_other_numbers_stay_as_they_are():
    model = nn.ModuleDict(
        {"lora_A": nn.ModuleDict({"a": nn.Linear(8, 2)}), "wide": nn.Sequential(nn.Linear(8, 8).double())}
    )

    assert pack_model(model) == 0


def test_a_processor_without_the_product_of_a_type_keeps_its_layers(monkeypatch):
    monkeypatch.setattr(packed, "can_multiply_bfloat16", lambda: False)

    assert pack_model(nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), nn.Linear(8, 8))) == 1


def test_bfloat16_layers_are_served_on_any_processor():
    layers = nn.Sequential(nn.Linear(96, 40, dtype=torch.bfloat16))
    inputs = torch.randn(3, 96, dtype=torch.bfloat16)
    expected = layers(inputs)

    assert pack_model(layers) == int(packed.can_multiply_bfloat16())

    assert torch.allclose(layers(inputs).float(), expected.float(), atol=2e-2)


def test_a_build_without_the_product_keeps_the_layers(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)

    assert pack_model(nn.Sequential(nn.Linear(8, 8))) == 0


def test_a_layer_that_would_compute_otherwise_is_not_packed(monkeypatch):
    class Wrong(PackedLinear):
        def forward(self, inputs):
            return 1.01 * super().forward(inputs)

    monkeypatch.setattr(packed, "PackedLinear", Wrong)

    assert pack_model(nn.Sequential(nn.Linear(8, 8))) == 0
