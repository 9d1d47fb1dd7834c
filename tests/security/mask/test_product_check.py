import numpy as np
import pytest

from phalanx.errors import FrameError, WrongProductError
from phalanx.security.mask import OsPads, P, ProductCheck
from phalanx.security.mask.freivalds import UnsafeNoChecker
from phalanx.security.mask.matrix import ring_matrix
from phalanx.security.mask.pads import Pad

ROWS, INNER, COLUMNS = 6, 24, 10


class FewSecrets:
    """Vectors that are drawn from so few numbers that a liar is lucky now and then."""

    def __init__(self, num_values, seed):
        self._num_values, self._rng = num_values, np.random.default_rng(seed)

    def draw_pad(self, rows, columns):
        return Pad(0, self._rng.integers(0, self._num_values, (rows, columns), dtype=np.uint32))


@pytest.fixture
def rng():
    return np.random.default_rng(5)


def a_product(rng):
    w = rng.integers(-30_000, 30_000, (INNER, COLUMNS), dtype=np.int32)
    z = rng.integers(0, P, (ROWS, INNER), dtype=np.uint32)
    return w, z, ring_matrix(w).left_multiply(z)


def tampered(rng, product, largest=P - 1):
    """The product with one element changed by anything from 1 to `largest`."""
    found = product.copy()
    place = rng.integers(ROWS), rng.integers(COLUMNS)
    delta = rng.choice([1, P - 1, int(rng.integers(1, P))]) if largest == P - 1 else rng.integers(1, largest + 1)
    found[place] = (int(found[place]) + int(delta)) % P
    return found


def caught(rng, times):
    w, z, product = a_product(rng)
    found = 0
    for _ in range(times):
        check = ProductCheck(w, OsPads())
        check.require_product(z, product, "honest")
        with pytest.raises(WrongProductError):
            check.require_product(z, tampered(rng, product), "lie")
        found += 1
    return found


def test_each_of_a_thousand_single_changes_is_found_and_no_honest_product_refused(rng):
    assert caught(rng, 1000) == 1000


@pytest.mark.slow
def test_each_of_a_hundred_thousand_single_changes_is_found(rng):
    assert caught(rng, 10**5) == 10**5


def test_the_message_says_which_product_is_wrong(rng):
    w, z, product = a_product(rng)

    with pytest.raises(WrongProductError, match=r"^layer 3, forward: is not the product of what was sent"):
        ProductCheck(w, OsPads()).require_product(z, tampered(rng, product), "layer 3, forward")


def test_a_whole_other_matrix_a_swapped_row_and_zeros_are_found(rng):
    w, z, product = a_product(rng)
    lies = [ring_matrix(w + 1).left_multiply(z), product[::-1].copy(), np.zeros_like(product), z[:, :COLUMNS].copy()]

    for lie in lies:
        with pytest.raises(WrongProductError):
            ProductCheck(w, OsPads()).require_product(z, lie, "lie")


@pytest.mark.parametrize("num_values", [2, 5])
def test_a_lie_passes_as_often_as_two_secrets_of_so_many_values_allow(num_values):
    # a change of one element passes exactly where both vectors are zero there: one in num_values squared
    rng, trials = np.random.default_rng(num_values), 1000
    w, z, product = a_product(rng)
    passed = 0
    for seed in range(trials):
        try:
            ProductCheck(w, FewSecrets(num_values, seed)).require_product(z, tampered(rng, product), "lie")
            passed += 1
        except WrongProductError:
            pass

    share = num_values**-2
    assert abs(passed - trials * share) < 5 * np.sqrt(trials * share * (1 - share))


def test_over_powers_of_two_the_same_check_would_miss_every_other_lie():
    rng, trials = np.random.default_rng(9), 2000
    lie = np.array([2**31], np.uint32)

    # the error times a secret of Z_2^32: nothing is left of it where the secret is even
    missed = int((lie * rng.integers(0, 2**32, trials, dtype=np.uint32) == 0).sum())

    assert 0.45 < missed / trials < 0.55


def test_a_check_that_has_refused_once_refuses_everything(rng):
    w, z, product = a_product(rng)
    check = ProductCheck(w, OsPads())
    with pytest.raises(WrongProductError):
        check.require_product(z, tampered(rng, product), "lie")

    with pytest.raises(WrongProductError, match="has refused before and proves nothing now"):
        check.require_product(z, product, "honest")


def test_the_secret_vectors_are_not_shown(rng):
    w, _, _ = a_product(rng)

    assert repr(ProductCheck(w, OsPads())) == "ProductCheck(...)"


def test_what_is_malformed_is_refused_before_it_is_checked(rng):
    w, z, product = a_product(rng)
    check = ProductCheck(w, OsPads())
    product[0, 0] = P

    with pytest.raises(FrameError, match="2147483647 or more"):
        check.require_product(z, product, "lie")


def test_without_a_check_every_lie_passes(rng):
    _, z, product = a_product(rng)

    UnsafeNoChecker().require_product(z, tampered(rng, product), "lie")
