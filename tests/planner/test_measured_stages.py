"""Layers are shared by measured speeds so that no other cut lets the slowest party be done sooner."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from phalanx.planner.cost.partition import MeasuredParties, propose_layers

PACES = st.floats(0.1, 10.0)


@given(st.integers(3, 9), PACES, st.lists(PACES, min_size=1, max_size=3), st.floats(0.0, 3.0))
def test_no_cut_lets_the_slowest_party_be_done_sooner(num_layers, owner_s, paces, edge_work):
    workers = {f"worker-{number}": seconds for number, seconds in enumerate(paces)}
    parties = MeasuredParties(owner_s, workers, edge_work)
    shares = [
        (num_layers - sum(middle), middle)
        for middle in product(range(1, num_layers), repeat=len(paces))
        if num_layers - sum(middle) >= 2
    ]

    layers = propose_layers(num_layers, parties)

    if not shares:
        assert layers is None
        return
    first, *middle, last = layers
    assert first + last + sum(middle) == num_layers
    assert parties.slowest_seconds(first + last, middle) == min(parties.slowest_seconds(*share) for share in shares)


def test_stages_shrink_when_machines_come_and_grow_when_they_go():
    def layers_with(num_workers):
        workers = {f"worker-{number}": 1.0 for number in range(num_workers)}
        return propose_layers(20, MeasuredParties(1.0, workers, 0.0))

    assert layers_with(2) == (3, 7, 7, 3)
    assert layers_with(3) == (3, 5, 5, 5, 2)
    assert layers_with(1) == (5, 10, 5)
    assert layers_with(0) is None


def test_a_machine_of_half_the_speed_gets_half_the_layers():
    assert propose_layers(9, MeasuredParties(1.0, {"fast": 1.0, "slow": 2.0}, 0.0)) == (2, 4, 2, 1)
