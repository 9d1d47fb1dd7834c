import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.planner.schedules import SCHEDULES, Action, verifiable_schedules
from phalanx.planner.schedules import stage_actions as order_of

shapes = st.integers(1, 16).flatmap(lambda k: st.tuples(st.integers(0, k - 1), st.just(k), st.integers(1, 40)))
names = st.sampled_from(verifiable_schedules())


@given(names, shapes)
def test_every_microbatch_goes_each_way_once(name, shape):
    actions = order_of(name, *shape)

    microbatches = shape[2]
    assert sorted(actions) == sorted(Action(d, m) for d in ("forward", "backward") for m in range(microbatches))


@given(names, shapes)
def test_work_is_that_of_the_own_stage_and_in_whole_steps(name, shape):
    stage, stages, microbatches = shape

    order = SCHEDULES[name].order(stage, stages, microbatches, 1)

    assert {(work.kind, work.stage) for work in order} == {("forward", stage), ("backward", stage)}


@given(names, shapes)
def test_a_microbatch_goes_forward_before_it_goes_backward(name, shape):
    actions = order_of(name, *shape)

    for m in range(shape[2]):
        assert actions.index(Action("forward", m)) < actions.index(Action("backward", m))


@given(names, shapes)
def test_backwards_are_in_ascending_order_so_that_gradients_add_up_alike(name, shape):
    actions = order_of(name, *shape)

    for direction in ("forward", "backward"):
        assert [a.microbatch for a in actions if a.direction == direction] == list(range(shape[2]))


def most_in_flight(actions):
    held, most = 0, 0
    for action in actions:
        held += 1 if action.direction == "forward" else -1
        most = max(most, held)
    return most


@given(shapes)
def test_1f1b_holds_no_more_microbatches_than_stages_come_after(shape):
    stage, stages, microbatches = shape

    assert most_in_flight(order_of("1f1b", *shape)) == min(microbatches, stages - stage)


@given(shapes)
def test_gpipe_holds_all(shape):
    assert most_in_flight(order_of("gpipe", *shape)) == shape[2]


@given(names, st.integers(1, 8), st.integers(1, 12))
def test_stages_that_wait_for_each_other_all_come_to_their_end(name, stages, microbatches):
    orders = [list(order_of(name, stage, stages, microbatches)) for stage in range(stages)]
    done = set()
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while order:
                direction, m = order[0]
                before = (stage - 1, "forward", m) if direction == "forward" else (stage + 1, "backward", m)
                if 0 <= before[0] < stages and before not in done:
                    break
                done.add((stage, *order.pop(0)))
                moved = True

    assert not any(orders)


def test_the_last_stage_of_1f1b_alternates():
    assert order_of("1f1b", 2, 3, 2) == (("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1))


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble", "interleaved-zero-bubble"])
def test_a_schedule_of_several_stages_a_rank_or_of_backwards_in_parts_is_none_for_verified_stages(name):
    assert name not in verifiable_schedules()
    with pytest.raises(ConfigError, match="whole stages and whole backwards"):
        [order_of(name, stage, 4, 8) for stage in range(4)]
