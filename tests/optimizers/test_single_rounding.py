"""An update in single roundings: each operation is the one that IEEE 754 defines, whatever kernels a machine has."""

import math
import os
import struct
import subprocess
import sys

import pytest
import torch

from phalanx.optimizers.single_rounding import UpdateRule

RULE = UpdateRule(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, num_updates=3)
DECAY = 0.1
COUNT = 20_000
OTHER_KERNELS = [
    {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"MKL_CBWR": "COMPATIBLE"},
]


def made():
    """Weights, gradients and moments over many powers of two; a normal draw would be the machine's own."""
    draw = torch.Generator().manual_seed(5)
    powers = torch.exp2(torch.randint(-30, 5, (COUNT,), generator=draw).float())

    def numbers():
        return torch.randint(-(2**23), 2**23, (COUNT,), generator=draw).float() * 2.0**-23 * powers

    return numbers(), numbers(), numbers(), numbers() ** 2


def updated():
    weight, gradient, average, square = made()
    RULE.apply_update(weight, gradient, average, square, DECAY)
    return torch.stack([weight, average, square])


def once(value):
    """A float64 result as float32: of one operation on float32 numbers this is the result rounded once."""
    return struct.unpack("f", struct.pack("f", value))[0]


def by_hand(weight, gradient, average, square):
    (first, second), eps = RULE.betas, once(RULE.eps)
    weight = once(weight * once(1.0 - RULE.lr * DECAY))
    average = once(once(average * once(first)) + once(gradient * once(1.0 - first)))
    square = once(once(square * once(second)) + once(once(gradient * gradient) * once(1.0 - second)))
    root = once(once(once(math.sqrt(square)) * once(1.0 / math.sqrt(1.0 - second**RULE.num_updates))) + eps)
    step = once(once(average / root) * once(RULE.lr / (1.0 - first**RULE.num_updates)))
    return once(weight - step), average, square


def test_every_operation_is_rounded_once_as_ieee_754_says():
    expected = [by_hand(*numbers) for numbers in zip(*(tensor.tolist() for tensor in made()), strict=True)]

    assert torch.equal(updated(), torch.tensor(expected).T)


@pytest.mark.parametrize("kernels", OTHER_KERNELS, ids=lambda kernels: " ".join(kernels.values()))
def test_an_update_has_the_same_bits_on_the_kernels_of_other_processors(kernels):
    program = "import test_single_rounding as t, sys; sys.stdout.buffer.write(t.updated().numpy().tobytes())"
    here = os.path.dirname(__file__)

    elsewhere = subprocess.run(
        [sys.executable, "-c", program], cwd=here, env=os.environ | kernels, stdout=subprocess.PIPE, check=True
    )

    assert elsewhere.stdout == updated().numpy().tobytes()
