"""What optimizers keep is what torch's own do."""

import pytest
import torch

from phalanx.optimizers import moment_names, moment_shapes

_TORCH = {
    "adamw": lambda p: torch.optim.AdamW([p]),
    "sgd": lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor([p]),
}


@pytest.mark.parametrize("kind", _TORCH)
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4)])
def test_moments_have_the_names_and_shapes_of_torchs_state(kind, shape):
    parameter = torch.nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    optimizer = _TORCH[kind](parameter)
    optimizer.step()

    kept = {name: tuple(value.shape) for name, value in optimizer.state[parameter].items() if name != "step"}

    assert moment_shapes(kind, shape) == kept
    assert set(kept) <= set(moment_names(kind))
