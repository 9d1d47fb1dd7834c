import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from phalanx.errors import FixedPointError
from phalanx.security.mask import worst_error
from phalanx.security.mask.fixed_point import (
    LARGEST,
    LENGTH,
    MAX_INNER,
    decode_product,
    encode_columns,
    encode_rows,
    typical_error,
)
from phalanx.security.mask.matrix import ring_matrix
from phalanx.security.mask.ring import HALF, P, centred_residues

FLOATS = st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60) | st.sampled_from([0.0, -0.0, 2.0**-149, 1.0])
TINY = 2.0**-149


def lengths(matrix, axis):
    return np.sqrt((matrix.astype(np.float64) ** 2).sum(axis=axis))


def through_the_ring(x, w, bound=None):
    rows, columns = encode_rows(x, bound), encode_columns(w)
    return decode_product(ring_matrix(columns.values).left_multiply(rows.values), rows.scales, columns.scales)


def share_off(x, w, bound=None):
    """How far off each element is, as a share of the lengths of its row and its column."""
    off = np.abs(through_the_ring(x, w, bound) - x.astype(np.float64) @ w.astype(np.float64))
    scale = (lengths(x, 1) if bound is None else np.full(len(x), bound))[:, None] * lengths(w, 0)
    # the answer is float32, which has steps of its own
    own = 2.0**-23 * np.abs(x.astype(np.float64) @ w.astype(np.float64)) + TINY
    return np.where(scale > 0, (off - own) / np.where(scale > 0, scale, 1), off)


@given(
    st.integers(1, 40).flatmap(lambda k: st.tuples(*(arrays(np.float32, s, elements=FLOATS) for s in ((2, k), (k, 3)))))
)
def test_no_product_is_further_off_than_is_said(given_matrices):
    x, w = given_matrices

    assert share_off(x, w).max() <= worst_error(x.shape[1])


@given(st.integers(1, 40).flatmap(lambda k: arrays(np.float32, (3, k), elements=FLOATS)))
def test_no_quantised_vector_is_longer_than_what_cannot_overflow(x):
    rows = centred_residues(encode_rows(x).values).astype(np.int64)
    columns = encode_columns(np.ascontiguousarray(x.T)).values.astype(np.int64)

    assert (rows**2).sum(axis=1).max() <= LENGTH**2 <= LARGEST < HALF
    assert (columns**2).sum(axis=0).max() <= LENGTH**2


@pytest.mark.parametrize("inner", [1, 2, 64, 4096])
def test_parallel_vectors_come_closest_to_overflow_and_do_not(inner):
    x = np.full((1, inner), 3.7, np.float32)

    found, opposite = through_the_ring(x, x.T)[0, 0], through_the_ring(-x, x.T)[0, 0]

    assert found == pytest.approx(lengths(x, 1)[0] ** 2, rel=worst_error(inner))
    assert opposite == -found


@pytest.mark.parametrize("inner", [64, 768, 4096])
def test_ordinary_products_are_off_as_little_as_is_said(inner):
    rng = np.random.default_rng(inner)
    x = (rng.standard_normal((64, inner)) * 10 ** rng.uniform(-20, 3, (64, 1))).astype(np.float32)
    w = rng.standard_normal((inner, 64)).astype(np.float32)

    root_mean_square = np.sqrt((share_off(x, w) ** 2).mean())

    assert root_mean_square <= 1.1 * typical_error(inner)


def test_the_relative_error_at_4096_is_below_the_aim_of_1_2e_3():
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 4096), (4096, 32)))
    exact = x.astype(np.float64) @ w.astype(np.float64)

    off = np.linalg.norm(through_the_ring(x, w) - exact) / np.linalg.norm(exact)

    assert off <= 1.2e-3


def test_with_a_bound_all_rows_have_one_scale_and_the_bound_counts():
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((8, 64)).astype(np.float32), rng.standard_normal((64, 8)).astype(np.float32)
    bound = 2 * float(lengths(x, 1).max())

    assert len(set(encode_rows(x, bound).scales)) == 1
    assert share_off(x, w, bound).max() <= worst_error(64)


def test_halves_are_rounded_to_even():
    bound = (LENGTH * (1 - 2.0**-24) - 1) / 1.0
    x = np.array([[0.5, 1.5, 2.5, -0.5]], np.float32)

    scaled = encode_rows(x, bound)

    assert scaled.scales[0] == pytest.approx(1.0, abs=1e-9)
    assert centred_residues(scaled.values).tolist() == [[0, 2, 2, 0]]


def test_a_row_longer_than_the_bound_is_an_overflow():
    x = np.ones((3, 4), np.float32)
    x[1] *= 3

    with pytest.raises(FixedPointError, match=r"^layer 3: overflow: row 1 has length 6, the scale was chosen for 5;"):
        encode_rows(x, 5.0, "layer 3")
    assert len(encode_rows(x, 6.0).scales) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_and_its_place_told_without_its_value(bad):
    x = np.ones((3, 4), np.float32)
    x[2, 1] = bad

    with pytest.raises(FixedPointError, match=r"^activations: row 2 holds NaN or infinity$"):
        encode_rows(x)
    with pytest.raises(FixedPointError, match=r"^weight: column 1 holds NaN or infinity$"):
        encode_columns(x)


@pytest.mark.parametrize(
    "x", [np.ones((2, 2)), np.ones(2, np.float32), np.ones((2, 0), np.float32), np.ones((0, 2), np.float32)], ids=str
)
def test_what_is_no_float32_matrix_is_refused(x):
    with pytest.raises(FixedPointError, match="expected a float32 matrix"):
        encode_rows(x)


@pytest.mark.parametrize("bound", [0.0, -1.0, np.nan, np.inf])
def test_a_bound_that_bounds_nothing_is_refused(bound):
    with pytest.raises(FixedPointError, match="expected a positive number"):
        encode_rows(np.ones((1, 1), np.float32), bound)


def test_too_long_vectors_are_refused():
    with pytest.raises(FixedPointError, match="inner dimension"):
        encode_rows(np.ones((1, MAX_INNER + 1), np.float32))


@pytest.mark.parametrize(
    ("value", "fits"),
    [(LARGEST, True), (P - LARGEST, True), (LARGEST + 1, False), (P - LARGEST - 1, False), (HALF, False)],
)
def test_a_number_that_no_product_can_be_is_refused(value, fits):
    product, one = np.array([[value]], np.uint32), np.ones(1)

    if fits:
        assert abs(decode_product(product, one, one)[0, 0]) == np.float32(LARGEST)
    else:
        with pytest.raises(FixedPointError, match="it was not computed from what was sent"):
            decode_product(product, one, one)


def test_a_product_too_large_for_float32_is_refused():
    x = np.full((1, 2), 1e30, np.float32)

    with pytest.raises(FixedPointError, match="too large for float32"):
        through_the_ring(x, x.T.copy())


def test_zeros_stay_zeros():
    x, w = np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32)

    assert not through_the_ring(x, w).any()
