"""A pool of pads: each leaves it once, with its own product, and a second worker that lies costs its pad alone."""

import numpy as np
import pytest

from phalanx.errors import FrameError, PadError, WrongProductError
from phalanx.security.mask.freivalds import ProductCheck
from phalanx.security.mask.matrix import ring_matrix
from phalanx.security.mask.message import MaskedMessage, ProductMessage
from phalanx.security.mask.pads import OsPads
from phalanx.security.mask.pool import PadPool
from phalanx.security.mask.ring import P

PRODUCT = ProductMessage("layer 0", "forward")
WEIGHT = np.random.default_rng(1).integers(-1000, 1000, (5, 3)).astype(np.int32)


@pytest.fixture
def pool():
    return PadPool(PRODUCT, WEIGHT, OsPads(), 4)


def product(values):
    return ring_matrix(WEIGHT).left_multiply(values)


def answer_to(request: MaskedMessage) -> MaskedMessage:
    return MaskedMessage(request.product, request.number, product(request.values))


def test_a_pad_is_handed_out_once_with_its_product_and_cut_to_the_rows_that_are_needed(pool):
    pool.make_pad()
    assert len(pool) == 1

    taken = pool.take_pad(2)

    assert taken.pad.shape == (2, 5)
    np.testing.assert_array_equal(taken.product, product(taken.pad))
    assert taken.pad.max() < P
    with pytest.raises(PadError, match="no pad is ready"):
        pool.take_pad(2)
    assert (taken.pad.tobytes().hex() in repr(taken), len(pool)) == (False, 0)


def test_pads_leave_in_the_order_of_their_making_and_differ(pool):
    for _ in range(3):
        pool.make_pad()

    taken = [pool.take_pad(4) for _ in range(3)]

    assert [pad.number for pad in taken] == [0, 1, 2]
    assert not np.array_equal(taken[0].pad, taken[1].pad)


def test_more_rows_than_a_pad_has_are_refused_and_cost_none(pool):
    pool.make_pad()

    with pytest.raises(PadError, match="5 rows are to be masked, pads have 4"):
        pool.take_pad(5)
    assert len(pool) == 1


def test_a_second_worker_multiplies_pads_and_its_product_is_checked(pool):
    request = pool.request_pad()
    assert len(pool) == 0

    pool.accept_product(answer_to(request), ProductCheck(WEIGHT, OsPads()))

    taken = pool.take_pad(4)
    np.testing.assert_array_equal(taken.pad, request.values)
    np.testing.assert_array_equal(taken.product, product(request.values))
    with pytest.raises(FrameError, match="was not asked for"):
        pool.accept_product(answer_to(request), ProductCheck(WEIGHT, OsPads()))


def test_a_lie_of_the_second_worker_is_refused_and_its_pad_never_used(pool):
    request = pool.request_pad()
    lie = answer_to(request)
    lie.values[1, 2] = (int(lie.values[1, 2]) + 1) % P

    with pytest.raises(WrongProductError, match="layer 0, forward, pad 0"):
        pool.accept_product(lie, ProductCheck(WEIGHT, OsPads()))

    assert len(pool) == 0
    with pytest.raises(FrameError, match="was not asked for"):
        pool.accept_product(answer_to(request), ProductCheck(WEIGHT, OsPads()))


@pytest.mark.parametrize("change", ["number", "product", "shape", "element"])
def test_an_answer_of_another_form_is_refused(pool, change):
    request = pool.request_pad()
    answer = answer_to(request)
    if change == "number":
        answer = MaskedMessage(PRODUCT, request.number + 1, answer.values)
    elif change == "product":
        answer = MaskedMessage(ProductMessage("layer 1", "forward"), request.number, answer.values)
    elif change == "shape":
        answer = MaskedMessage(PRODUCT, request.number, answer.values[:, :2])
    else:
        answer.values[0, 0] = P

    with pytest.raises(FrameError):
        pool.accept_product(answer, ProductCheck(WEIGHT, OsPads()))
    assert len(pool) == 0
