import numpy as np
import pytest
import torch

from phalanx.errors import FrameError
from phalanx.security.mask.int8_limbs import MAX_INNER, Int8Matrix
from phalanx.security.mask.ring import HALF, FloatMatrix, P

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("largest", [1, 2**15 - 1, P - 1])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 1, 1), (17, 8, 16), (40, 37, 29)])
def test_products_of_8_bit_limbs_are_those_of_float64(device, largest, rows, inner, columns):
    rng = np.random.default_rng(rows)
    z = rng.integers(0, P, (rows, inner), dtype=np.uint32)
    z[0] = HALF
    w = rng.integers(-largest, largest + 1, (inner, columns))
    w[0] = largest

    assert (Int8Matrix(w, device).left_multiply(z) == FloatMatrix(w).left_multiply(z)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_the_largest_numbers_are_exact_in_8_bit_limbs_too(device):
    z = np.array([[HALF], [HALF + 1], [P - 1]], np.uint32).repeat(4096, axis=1)
    w = np.array([[HALF, -HALF, 127 * 257, -128 * 257]]).repeat(4096, axis=0)

    assert (Int8Matrix(w, device).left_multiply(z) == FloatMatrix(w).left_multiply(z)).all()


def test_an_inner_dimension_whose_sums_could_overflow_is_refused():
    with pytest.raises(ValueError, match="inner dimension"):
        Int8Matrix(np.ones((MAX_INNER + 1, 1), np.int64), "cpu")


def test_what_is_no_element_is_refused_here_too():
    with pytest.raises(FrameError, match="2147483647 or more"):
        Int8Matrix([[1]], "cpu").left_multiply(np.array([[P]], np.uint32))
