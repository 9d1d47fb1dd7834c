"""How layers are cut into stages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.models import StageSpec, partition_layers


def sizes(specs):
    return tuple(spec.num_layers for spec in specs)


def costs(layers, first, head):
    last = len(layers) - 1
    return [n + first * (i == 0) + head * (i == last) for i, n in enumerate(layers)]


def test_even_layers_are_cut_evenly():
    specs = partition_layers(12, 4, None, 0.0, 0.0)

    assert sizes(specs) == (3, 3, 3, 3)
    assert [spec.first_layer for spec in specs] == [0, 3, 6, 9]
    assert [(spec.is_first, spec.is_last) for spec in specs] == [
        (True, False),
        (False, False),
        (False, False),
        (False, True),
    ]


def test_a_heavy_head_takes_layers_from_the_last_stage():
    assert sizes(partition_layers(30, 4, None, 0.0, 8.0)) == (9, 9, 10, 2)


def test_one_stage_is_first_and_last():
    (spec,) = partition_layers(3, 1, None, 1.0, 1.0)

    assert spec.is_first
    assert spec.is_last
    assert (spec.first_layer, spec.end_layer) == (0, 3)


@given(
    layers=st.integers(1, 9),
    stages=st.integers(1, 9),
    first=st.floats(0, 6, allow_nan=False),
    head=st.floats(0, 6, allow_nan=False),
)
def test_no_other_cut_has_a_cheaper_costliest_stage(layers, stages, first, head):
    if stages > layers:
        stages = layers
    found = sizes(partition_layers(layers, stages, None, first, head))

    cuts = itertools.combinations(range(1, layers), stages - 1)
    others = [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]

    assert sum(found) == layers
    assert min(found) >= 1
    assert max(costs(found, first, head)) == min(max(costs(other, first, head)) for other in others)


def test_given_layers_are_taken_as_they_are():
    assert sizes(partition_layers(6, 3, (1, 4, 1), 0.0, 0.0)) == (1, 4, 1)


@pytest.mark.parametrize("given_layers", [(1, 2), (2, 2, 2, 0), (1, 1, 1, 2), (3, 3, 3, -3)])
def test_given_layers_that_do_not_add_up_are_refused(given_layers):
    with pytest.raises(ConfigError, match=r"pipeline\.layers_per_stage: .* 4 numbers .* 6 layers"):
        partition_layers(6, 4, given_layers, 0.0, 0.0)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ConfigError, match="5 stages need at least 5 layers, the model has 4; lower stages to 4"):
        partition_layers(4, 5, None, 0.0, 0.0)


def test_no_stage_is_refused():
    with pytest.raises(ConfigError, match="found 0; expected at least 1"):
        partition_layers(4, 0, None, 0.0, 0.0)


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), -1.0])
def test_costs_that_are_no_amount_are_refused(cost):
    with pytest.raises(ConfigError, match="finite"):
        partition_layers(4, 2, None, 0.0, cost)


@pytest.mark.parametrize("fields", [(2, 2, 1, 2), (-1, 2, 0, 1), (0, 2, 0, 0), (0, 2, 2, 2), (1, 2, 0, 2)])
def test_a_spec_that_contradicts_itself_is_refused(fields):
    with pytest.raises(ConfigError, match="stage"):
        StageSpec(*fields)


def test_stages_behind_a_front_begin_where_it_ends_and_the_first_one_does_not_embed():
    specs = partition_layers(4, 3, None, 0.0, 0.0, front=2)

    assert (specs[0].first_layer, specs[-1].end_layer) == (2, 6)
    assert (specs[0].is_first, specs[0].has_embedding) == (True, False)
    assert all(before.end_layer == after.first_layer for before, after in itertools.pairwise(specs))


@given(
    layers=st.integers(3, 10),
    stages=st.integers(3, 6),
    first=st.floats(0, 6, allow_nan=False),
    head=st.floats(0, 6, allow_nan=False),
)
def test_with_the_ends_in_one_process_no_other_cut_has_a_less_busy_busiest_process(layers, stages, first, head):
    stages = min(stages, layers)
    found = sizes(partition_layers(layers, stages, None, first, head, ends_in_one_process=True))

    def busiest(cut):
        work = costs(cut, first, head)
        return max(work[0] + work[-1], *work[1:-1])

    cuts = itertools.combinations(range(1, layers), stages - 1)
    others = [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in cuts]

    assert sum(found) == layers
    assert min(found) >= 1
    assert busiest(found) == pytest.approx(min(busiest(other) for other in others))


def test_an_owner_with_both_ends_and_a_heavy_head_has_few_layers():
    assert sizes(partition_layers(30, 4, None, 0.0, 8.0, ends_in_one_process=True)) == (4, 12, 13, 1)
