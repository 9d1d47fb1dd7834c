"""The order of a run is a permutation per epoch, for every size and key."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.data.order import sample_indices
from phalanx.data.order.permutation import permute_positions


@settings(deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**6))
def test_an_epoch_visits_every_sequence_once(size, seed, epoch):
    image = permute_positions(np.arange(size, dtype=np.uint64), size, seed, epoch)

    assert sorted(image.tolist()) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 60), seed=st.integers(0, 9), cuts=st.lists(st.integers(1, 50), min_size=1, max_size=6))
def test_the_order_does_not_depend_on_how_it_is_cut(size, seed, cuts):
    whole = sample_indices(0, sum(cuts), size, seed)

    pieces = []
    for cut in cuts:
        pieces += sample_indices(len(pieces), cut, size, seed)

    assert pieces == whole
    spread = Counter(whole)
    assert max(spread.values()) - min(spread[index] for index in range(size)) <= 1


def test_epochs_and_seeds_give_other_orders():
    orders = {tuple(sample_indices(epoch * 50, 50, 50, seed)) for epoch in range(3) for seed in range(3)}

    assert len(orders) == 9


def test_a_large_corpus_needs_no_table():
    indices = sample_indices(10**12, 512, 10**8, seed=1)

    assert len(set(indices)) == 512
    assert 0 <= min(indices) < max(indices) < 10**8


def test_neighbours_do_not_stay_together():
    order = np.array(sample_indices(0, 1000, 1000, seed=3))

    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.1
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1


def test_the_order_is_the_same_in_every_version():
    # recorded once: a change would give resumed runs other batches
    assert sample_indices(8, 8, 10, seed=7) == [2, 8, 7, 6, 8, 4, 9, 5]
