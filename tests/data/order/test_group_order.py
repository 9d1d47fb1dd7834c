"""The order of one group: every epoch has every sequence once, through curricula that change in the middle of it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data.order.group_order import GroupOrder, Leg
from phalanx.data.order.schedule import Curriculum


def scores(name: str) -> np.ndarray:
    assert name == "length"
    return np.arange(100)[::-1]


def order_of(size: int, *legs: Leg, seed: int = 1, label: str = "text") -> GroupOrder:
    return GroupOrder(size, seed, label, list(legs), lambda name: scores(name)[-size:])


def epochs_of(order: GroupOrder, size: int, count: int) -> np.ndarray:
    return order.group_sequences(np.arange(size * count)).reshape(count, size)


LADDER = Curriculum("length", 4)


@given(
    size=st.integers(1, 20),
    starts=st.lists(st.integers(1, 50), max_size=3, unique=True),
    first_is_random=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_every_epoch_has_every_sequence_once(size, starts, first_is_random, seed):
    legs = [
        Leg(start, None if (number % 2 == 0) == first_is_random else LADDER)
        for number, start in enumerate([0, *sorted(starts)])
    ]
    order = order_of(size, *legs, seed=seed)

    for epoch in epochs_of(order, size, 4):
        assert sorted(epoch) == list(range(size))


def test_an_order_is_that_of_its_seed_group_and_epoch_and_of_no_other():
    first, again = (epochs_of(order_of(20, Leg(0, None)), 20, 2) for _ in range(2))

    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], first[1])
    for other in (order_of(20, Leg(0, None), seed=2), order_of(20, Leg(0, None), label="code")):
        assert not np.array_equal(first, epochs_of(other, 20, 2))


def test_samples_are_the_same_in_any_batches_and_order():
    order = order_of(13, Leg(0, None), Leg(20, LADDER))
    ranks = np.arange(39)
    shuffled = np.random.default_rng(0).permutation(ranks)

    whole = order.group_sequences(ranks)

    np.testing.assert_array_equal(order.group_sequences(shuffled), whole[shuffled])
    np.testing.assert_array_equal(np.concatenate([order.group_sequences(ranks[k : k + 1]) for k in ranks]), whole)
    assert len(order.group_sequences(np.arange(0))) == 0


@pytest.mark.parametrize("descending", [False, True])
def test_buckets_come_in_the_order_of_the_score(descending):
    order = order_of(20, Leg(0, Curriculum("length", 4, descending=descending)))
    values = scores("length")[-20:]

    for epoch in epochs_of(order, 20, 2):
        buckets = np.split(values[epoch], 4)
        for earlier, later in pairwise(buckets):
            assert earlier.min() > later.max() if descending else earlier.max() < later.min()
    # within a bucket the order is random
    assert not np.array_equal(*epochs_of(order, 20, 2))


def test_more_buckets_than_sequences_are_one_each():
    (epoch,) = epochs_of(order_of(3, Leg(0, Curriculum("length", 50))), 3, 1)

    assert list(scores("length")[-3:][epoch]) == [0, 1, 2]


def test_a_new_leg_gives_the_rest_of_the_epoch_what_it_has_not_had():
    before = order_of(10, Leg(0, None)).group_sequences(np.arange(10))
    values = scores("length")[-10:]

    after = order_of(10, Leg(0, None), Leg(4, Curriculum("length", 6))).group_sequences(np.arange(10))

    np.testing.assert_array_equal(after[:4], before[:4])
    assert set(after[4:]) == set(before[4:])
    assert list(values[after[4:]]) == sorted(values[before[4:]])


def test_equal_scores_are_in_the_order_of_their_numbers():
    order = GroupOrder(6, 1, "text", [Leg(0, Curriculum("length", 6))], lambda name: np.zeros(6))

    assert list(order.group_sequences(np.arange(6))) == list(range(6))


def test_a_larger_share_has_the_sequences_of_a_smaller_one_and_its_epochs_begin_where_it_does():
    order = order_of(20, Leg(0, None, 4), Leg(6, None, 10), Leg(26, LADDER, 10), Leg(31, None))
    samples = order.group_sequences(np.arange(60)).tolist()

    few, more, whole = set(samples[:4]), set(samples[6:16]), set(range(20))
    assert (len(few), len(more)) == (4, 10)
    assert few < more
    assert set(samples[4:6]) < few
    # one whole epoch of each share, then the ladder's half epoch of the same ten
    assert sorted(samples[16:26]) == sorted(more)
    assert len(set(samples[26:31]) & more) == 5
    assert set(samples[31:51]) == whole
    assert samples[6:16] != samples[16:26]


@given(share=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_a_share_is_drawn_by_the_seed_alone_and_a_curriculum_orders_what_is_in_it(share, seed):
    random, ordered = (
        order_of(20, Leg(0, curriculum, share), seed=seed).group_sequences(np.arange(share))
        for curriculum in (None, LADDER)
    )
    values = scores("length")[-20:][ordered]
    edges = np.arange(min(4, share) + 1) * share // min(4, share)

    assert set(random) == set(ordered)
    assert len(set(random)) == share
    for earlier, later in pairwise(np.split(values, edges[1:-1])):
        assert earlier.max() < later.min()
