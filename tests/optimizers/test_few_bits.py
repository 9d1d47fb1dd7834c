"""AdamW with a byte for each number of a moment: bitsandbytes' own steps, and a state that is ours."""

import importlib

import pytest
import torch

from phalanx.config.extras import has_bitsandbytes, import_bitsandbytes
from phalanx.errors import ConfigError
from phalanx.optimizers import moment_names, moment_shapes
from phalanx.optimizers.few_bits import AdamW8bit
from phalanx.planner.model.optimizers import OPTIMIZERS

NEEDS_QUANT = pytest.mark.skipif(not has_bitsandbytes(), reason="needs the extra `quant`")
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def made():
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(64, 72), (40,)]]


def steps(optimizer, parameters, first, last):
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@NEEDS_QUANT
def test_steps_are_those_of_bitsandbytes():
    import_bitsandbytes()
    mine, theirs = made(), made()
    steps(AdamW8bit(mine, **SETTINGS), mine, 0, 5)
    steps(importlib.import_module("bitsandbytes.optim").AdamW8bit(theirs, **SETTINGS), theirs, 0, 5)

    assert torch.equal(mine[0], theirs[0])
    # kept in float32 by both
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-5, atol=1e-6)


@NEEDS_QUANT
def test_a_state_that_is_put_back_goes_on_with_the_same_bits():
    straight, stopped, resumed = made(), made(), made()
    steps(AdamW8bit(straight, **SETTINGS), straight, 0, 6)
    before = AdamW8bit(stopped, **SETTINGS)
    steps(before, stopped, 0, 3)
    after = AdamW8bit(resumed, **SETTINGS)
    for old, new in zip(stopped, resumed, strict=True):
        new.detach().copy_(old)
        after.state[new] = {name: value.clone() for name, value in before.state[old].items()}

    steps(after, resumed, 3, 6)

    assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))


@NEEDS_QUANT
def test_the_table_tells_what_is_kept():
    parameters = made()
    optimizer = AdamW8bit(parameters, **SETTINGS)
    steps(optimizer, parameters, 0, 1)

    for parameter in parameters:
        kept = {name: tuple(value.shape) for name, value in optimizer.state[parameter].items() if name != "step"}
        assert kept == moment_shapes("adamw8bit", parameter.shape)
        assert set(kept) <= set(moment_names("adamw8bit"))
    large = optimizer.state[parameters[0]]
    assert {large[name].dtype for name in OPTIMIZERS["adamw8bit"].in_bytes} == {torch.uint8}
    assert OPTIMIZERS["adamw8bit"].bytes_per_parameter == 2


def test_tensors_of_fewer_numbers_than_are_worth_it_keep_float32():
    assert set(moment_shapes("adamw8bit", (4095,))) == {"exp_avg", "exp_avg_sq"}
    assert moment_shapes("adamw8bit", (4096,))["exp_avg_scale"] == (16,)
    assert moment_shapes("adamw8bit", (4097,))["exp_avg_scale"] == (17,)


def test_without_the_package_there_is_no_such_optimizer(monkeypatch):
    monkeypatch.setattr("phalanx.config.extras.has_bitsandbytes", lambda: False)

    with pytest.raises(ConfigError, match=r"needs bitsandbytes, which is not installed"):
        AdamW8bit(made(), **SETTINGS)
