import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import FrameError
from phalanx.security.mask.matrix import ring_matrix
from phalanx.security.mask.ring import (
    _FEW,
    HALF,
    LIMIT,
    MAX_INNER,
    FloatMatrix,
    P,
    add_mod_p,
    balanced_limbs,
    centred_residues,
    limb_bits,
    reduce_mod_p,
    size_in_limbs,
    subtract_mod_p,
    to_ring,
)

EDGES = [0, 1, 2, HALF - 1, HALF, HALF + 1, P - 2, P - 1]
ELEMENTS = st.sampled_from(EDGES) | st.integers(0, P - 1)


def exact(z, w):
    """The product in Python's integers."""
    return ((z.astype(object) @ w.astype(object)) % P).astype(np.uint32)


def elements(rng, *shape):
    """Uniform elements of Z_p, with every fourth one an edge."""
    values = rng.integers(0, P, shape, dtype=np.uint32)
    return np.where(rng.random(shape) < 0.25, rng.choice(np.array(EDGES, np.uint32), shape), values)


def integers(rng, largest, *shape):
    """Integers up to `largest` in absolute value, with every fourth one an edge."""
    values = rng.integers(-largest, largest + 1, shape)
    edges = rng.choice([-largest, -1, 0, 1, largest], shape)
    return np.where(rng.random(shape) < 0.25, edges, values)


def count_wrong(rng, rounds, rows, columns, inner):
    """(wrong, all) elements of products of every kind of right factor."""
    wrong = total = 0
    for index in range(rounds):
        z = elements(rng, rows, inner)
        w = integers(rng, (127, 2**15, 2**20, P - 1)[index % 4], inner, columns)
        found = ring_matrix(w).left_multiply(z)
        wrong += int((found != exact(z, w)).sum())
        total += found.size
    return wrong, total


def test_no_product_of_a_hundred_thousand_is_wrong():
    wrong, total = count_wrong(np.random.default_rng(1), rounds=12, rows=94, columns=94, inner=24)

    assert total > 10**5
    assert wrong == 0


@pytest.mark.slow
def test_no_product_of_ten_million_is_wrong():
    wrong, total = count_wrong(np.random.default_rng(2), rounds=160, rows=256, columns=256, inner=24)

    assert total > 10**7
    assert wrong == 0


@pytest.mark.parametrize("inner", [1, 2, 255, 256, 257, 4096, 8192, 8193, 70_000])
def test_the_largest_numbers_are_exact_at_every_inner_dimension(inner):
    z = np.array([[HALF], [HALF + 1], [P - 1], [1]], np.uint32).repeat(inner, axis=1)
    w = np.array([[HALF, -HALF, P - 1, 2**15 - 1]]).repeat(inner, axis=0)

    assert (ring_matrix(w).left_multiply(z) == exact(z, w)).all()


@pytest.mark.parametrize("inner", [1, 255, 257, 4096, 8193])
def test_few_sums_and_many_are_joined_alike(inner):
    z = np.array([[HALF], [HALF + 1], [P - 1], [1]], np.uint32).repeat(inner, axis=1)
    w = np.array([[HALF, -HALF, P - 1, 2**15 - 1]]).repeat(inner, axis=0)
    matrix = FloatMatrix(w)
    sums = centred_residues(z).astype(np.float64) @ matrix._limbs

    few, many = matrix._join_limbs(sums), matrix._join_limbs(sums.repeat(2000, axis=0))

    assert sums.size <= _FEW < 2000 * sums.size
    assert (few == exact(z, w)).all()
    assert (many == exact(z, w).repeat(2000, axis=0)).all()


def test_the_worst_limbs_of_each_width_stay_below_what_float64_counts():
    for bits in range(2, 17):
        most = LIMIT // (HALF * 2 ** (bits - 1))

        assert bits == 16 or limb_bits(most) == bits
        assert HALF * 2 ** (limb_bits(most) - 1) * most <= LIMIT
        assert bits == 2 or limb_bits(most + 1) == bits - 1
    assert MAX_INNER == LIMIT // (HALF * 2)


def test_one_product_does_where_columns_are_small_and_no_longer_where_they_are_not():
    most = LIMIT // HALF // 4

    assert FloatMatrix(np.full((4, 1), most)).num_limbs == 1
    assert FloatMatrix(np.full((4, 1), most + 1)).num_limbs > 1


def test_a_float_product_without_limbs_would_be_wrong():
    z, w = np.full((1, 9), HALF, np.uint32), np.full((9, 1), HALF - 2)

    naive = int((z.astype(np.float64) @ w.astype(np.float64))[0, 0]) % P

    assert naive != exact(z, w)[0, 0]
    assert ring_matrix(w).left_multiply(z) == exact(z, w)


@given(ELEMENTS, ELEMENTS)
def test_sums_differences_and_residues_are_those_of_python(a, b):
    left, right = np.array([a], np.uint32), np.array([b], np.uint32)

    assert add_mod_p(left, right)[0] == (a + b) % P
    assert subtract_mod_p(left, right)[0] == (a - b) % P
    assert centred_residues(left)[0] == (a if a <= HALF else a - P)
    assert to_ring(centred_residues(left))[0] == a


@given(
    st.sampled_from([k * P + d for k in (-(2**21), -1, 0, 1, 2**21) for d in (-1, 0, 1, HALF, HALF + 1)])
    | st.integers(-LIMIT, LIMIT)
)
def test_a_float_is_reduced_to_the_residue_of_the_integer_that_it_holds(value):
    assert reduce_mod_p(np.array([[float(value)]]))[0, 0] == value % P


@pytest.mark.parametrize("value", [LIMIT, -LIMIT, LIMIT - 1, 1 - LIMIT])
def test_the_ends_of_the_range_are_reduced_too(value):
    assert reduce_mod_p(np.array([[float(value)]]))[0, 0] == value % P


@given(st.lists(st.integers(-HALF, HALF), min_size=1, max_size=8), st.integers(2, 16))
def test_limbs_are_balanced_and_add_up(values, bits):
    limbs = balanced_limbs(np.array([values], np.int64), bits)

    assert sum(limb * 2 ** (bits * i) for i, limb in enumerate(limbs)).tolist() == [values]
    assert all((-(2 ** (bits - 1)) <= limb).all() and (limb < 2 ** (bits - 1)).all() for limb in limbs)


def test_a_product_with_no_rows_has_none():
    assert ring_matrix([[1, 2]]).left_multiply(np.zeros((0, 1), np.uint32)).shape == (0, 2)


@pytest.mark.parametrize(
    ("z", "said"),
    [
        (np.full((1, 2), P, np.uint32), "2147483647 or more"),
        (np.full((1, 2), 2**32 - 1, np.uint32), "2147483647 or more"),
        (np.zeros((1, 3), np.uint32), "got uint32 [1, 3], expected uint32 [any, 2]"),
        (np.zeros((1, 2), np.int32), "got int32 [1, 2], expected uint32 [any, 2]"),
        (np.zeros((1, 2), np.float64), "got float64"),
        ([[1, 2]], "got list"),
        (np.uint32(1), "got uint32 []"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_matrix_of_elements_is_refused(z, said):
    with pytest.raises(FrameError) as caught:
        ring_matrix([[1], [2]]).left_multiply(z)

    assert said in str(caught.value)


@pytest.mark.parametrize("values", [[[P]], [[-P]], [[0.5]], [1, 2], np.zeros((0, 2), int), [[True]]], ids=str)
def test_what_is_no_matrix_of_residues_is_refused_as_a_right_factor(values):
    with pytest.raises(ValueError, match=r"^ring: "):
        ring_matrix(values)


@pytest.mark.parametrize("inner", [0, MAX_INNER + 1])
def test_an_inner_dimension_for_which_nothing_is_exact_is_refused(inner):
    with pytest.raises(ValueError, match="inner dimension"):
        limb_bits(inner)


@pytest.mark.parametrize("inner", [1, 300, 2**12, 2**16, MAX_INNER])
@pytest.mark.parametrize("edge", [2**15 - 1, 1 - 2**15])
def test_a_matrix_takes_no_more_memory_than_is_reserved_for_it(inner, edge):
    values = np.full((inner, 1), edge, np.int32)

    assert values.nbytes + FloatMatrix(values)._limbs.nbytes <= size_in_limbs(inner, 1)
