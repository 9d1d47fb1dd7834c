"""What islands send each other as bytes, and what a checkpoint of other islands stands in for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.parallel import RankEnv, fallback_key, join_ranks
from phalanx.parallel.config import OuterConfig
from phalanx.parallel.data.diloco import OuterStep
from phalanx.parallel.data.parameters import RankParameter
from phalanx.parallel.groups.int8_blocks import dequantize_blocks, quantize_blocks


@settings(max_examples=25, deadline=None)
@given(number=st.integers(1, 2500), seed=st.integers(0, 99), size=st.sampled_from([0.0, 1e-30, 1e-6, 1.0, 1e6]))
def test_no_number_is_off_by_more_than_half_a_unit_of_its_block(number, seed, size):
    values = size * torch.randn(number, generator=torch.Generator().manual_seed(seed))

    sent, scales = quantize_blocks(values, 1024)

    assert sent.dtype == torch.int8
    units = scales.expand(-1, 1024).reshape(-1)[:number]
    assert torch.all((dequantize_blocks(sent, scales, values) - values).abs() <= 0.5001 * units)


def test_a_block_of_small_numbers_is_not_rounded_by_a_large_one_elsewhere():
    values = torch.cat([torch.full((1024,), 1e-3), torch.full((1024,), 1e3)])

    sent, scales = quantize_blocks(values, 1024)

    assert torch.allclose(dequantize_blocks(sent, scales, values), values, rtol=1e-6)


def test_what_rounding_loses_is_sent_in_the_end():
    wanted, residual, received = torch.linspace(-1.0, 1.0, 50), torch.zeros(50), torch.zeros(50)

    for _ in range(100):
        sent, scales = quantize_blocks(wanted + residual, 1024)
        came = dequantize_blocks(sent, scales, wanted)
        residual = wanted + residual - came
        received += came

    assert torch.allclose(received / 100, wanted, atol=1.0 / 127 / 100)


@pytest.fixture
def alone(tmp_path):
    with join_ranks(RankEnv(0, 1, 0, 1, tmp_path / "meeting"), torch.device("cpu"), "00" * 32):
        yield torch.distributed.group.WORLD


@pytest.mark.parametrize("compression", ["none", "int8"])
def test_an_outer_step_moves_what_is_too_small_for_one_message(alone, compression):
    parameter = torch.nn.Parameter(torch.zeros(2))
    held = RankParameter("w", parameter, split=None, is_partial=False, is_second=False, is_tied=False)
    config = OuterConfig(every=1, lr=1.0, momentum=0.0, compression=compression)
    outer = OuterStep([held], config, alone)

    for _ in range(50):
        with torch.no_grad():
            parameter.add_(torch.tensor([1.0, 0.001]))
        outer.step()

    # half a unit of a byte is 1 / 254
    assert parameter.tolist() == pytest.approx([50.0, 0.05], abs=1e-4 if compression == "none" else 0.005)


def test_momentum_is_that_of_torchs_nesterov(alone):
    ours, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    held = RankParameter("w", ours, split=None, is_partial=False, is_second=False, is_tied=False)
    outer = OuterStep([held], OuterConfig(every=1, lr=0.7, momentum=0.9), alone)
    reference = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)

    for step in range(1, 6):
        with torch.no_grad():
            ours.sub_(0.1 * step)
        theirs.grad = torch.full((3,), 0.1 * step)
        outer.step()
        reference.step()

    assert torch.allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "read"),
    [
        ("weight/w", "weight/w"),
        ("exp_avg/w", "exp_avg/w"),
        ("exp_avg@1/w", "exp_avg/w"),
        ("outer_momentum/w", None),
        ("outer_residual@1/w", None),
    ],
)
def test_islands_that_a_checkpoint_lacks_begin_as_the_first(key, read):
    assert fallback_key(key, {"weight/w": 0, "exp_avg/w": 0}) == read
    assert fallback_key(key, {key: 0}) == key
