"""An activation by one kernel is the function that it replaces."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from phalanx.parallel.model.recompute import fuse_activations


def test_a_fused_activation_has_the_values_and_gradients_of_the_composed_one():
    composed, fused = ACT2FN["gelu_new"], nn.Sequential(nn.Sequential(ACT2FN["gelu_new"]))
    fuse_activations(fused)
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64, requires_grad=True)

    found, expected = fused(x), composed(x)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)]

    assert isinstance(fused[0][0], nn.GELU)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=1e-12)


def test_other_activations_stay_as_they_are():
    given = nn.Sequential(nn.SiLU(), ACT2FN["gelu"], nn.ReLU())
    before = list(given)

    fuse_activations(given)

    assert list(given) == before
