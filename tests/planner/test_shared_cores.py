"""Ranks that share cores: schedules played through, and steps that take longer in proportion."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.planner import Layout
from phalanx.planner.cluster.machine import Machine
from phalanx.planner.cost.schedule import StageTimes, simulate_step
from phalanx.planner.cost.step import play_sharing, play_timeline, step_time
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.schedules import SCHEDULES, rank_orders

NAMES = st.sampled_from(sorted(SCHEDULES))
SECONDS = st.floats(0.01, 2.0)


def given_times(data: st.DataObject, stages: int) -> list[StageTimes]:
    return [StageTimes(data.draw(SECONDS), data.draw(SECONDS), data.draw(SECONDS)) for _ in range(stages)]


@settings(deadline=None)
@given(data=st.data(), schedule=NAMES, ranks=st.integers(1, 4), rounds=st.integers(1, 3), latency=st.floats(0, 0.5))
def test_with_a_core_each_nothing_is_shared(
    data: st.DataObject, schedule: str, ranks: int, rounds: int, latency: float
) -> None:
    chunks = SCHEDULES[schedule].chunks
    times, microbatches = given_times(data, ranks * chunks), rounds * ranks

    shared = play_sharing(rank_orders(schedule, ranks, microbatches, chunks), times, ranks, latency)

    assert shared.length_s == pytest.approx(simulate_step(schedule, ranks, microbatches, times, latency).length_s)


@settings(deadline=None)
@given(data=st.data(), schedule=NAMES, ranks=st.integers(1, 4), rounds=st.integers(1, 3))
def test_one_core_is_never_idle_and_does_all_the_work(
    data: st.DataObject, schedule: str, ranks: int, rounds: int
) -> None:
    chunks = SCHEDULES[schedule].chunks
    times, microbatches = given_times(data, ranks * chunks), rounds * ranks

    shared = play_sharing(rank_orders(schedule, ranks, microbatches, chunks), times, 1.0)

    work = microbatches * sum(time.forward + time.inputs + time.weights for time in times)
    assert shared.length_s == pytest.approx(work)
    assert len(shared.slots) == len({slot.work for slot in shared.slots})


def test_orders_that_wait_for_each_other_are_refused() -> None:
    first, second = rank_orders("1f1b", 2, 2)

    with pytest.raises(ValueError, match="wait for each other"):
        play_sharing((first[::-1], second), [StageTimes(1.0, 1.0, 1.0)] * 2, 2)


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(tp=4), Layout(dp=4, zero=3), Layout(dp=2, tp=2)])
def test_twice_as_many_ranks_as_cores_take_twice_as_long(
    tiny: ModelShape, recipe: Recipe, machine: Machine, layout: Layout
) -> None:
    alone = replace(machine, overlap=False)
    crowded = replace(alone, cores=2)

    ratio = (
        step_time(tiny, layout, recipe, crowded).total_seconds / step_time(tiny, layout, recipe, alone).total_seconds
    )

    assert ratio == pytest.approx(2.0)


def test_a_pipeline_on_too_few_cores_waits_for_them_and_not_for_other_stages(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    layout, alone = Layout(pp=4), replace(machine, overlap=False, memory_bytes_per_s=None)
    times = play_timeline(tiny, layout, recipe, alone)

    crowded = step_time(tiny, layout, recipe, replace(alone, cores=1))

    assert crowded.total_seconds - crowded.data == pytest.approx(times.busy_s, rel=1e-3)
    assert play_timeline(tiny, layout, recipe, replace(alone, cores=1)).length_s == pytest.approx(
        times.busy_s, rel=1e-3
    )


def test_cores_that_carry_the_bytes_themselves_hide_nothing(tiny: ModelShape, recipe: Recipe, machine: Machine) -> None:
    hidden = step_time(tiny, Layout(dp=4), recipe, machine)

    shown = step_time(tiny, Layout(dp=4), recipe, replace(machine, overlap=False))

    assert hidden.hidden > 0
    assert shown.hidden == 0
    assert shown.data == pytest.approx(hidden.data + hidden.hidden)


def test_zero_1_also_tells_the_others_what_it_has_updated(tiny: ModelShape, recipe: Recipe, machine: Machine) -> None:
    bare = replace(machine, overlap=False)

    plain, shared = (step_time(tiny, Layout(dp=4, zero=zero), recipe, bare).data for zero in (0, 1))

    assert shared == pytest.approx(1.5 * plain)


def test_a_vocabulary_that_ranks_share_is_exchanged_too(tiny: ModelShape, recipe: Recipe, machine: Machine) -> None:
    odd = replace(tiny, vocab=127)

    shared, whole = (step_time(shape, Layout(tp=2), recipe, machine).compute for shape in (tiny, odd))

    assert shared > whole
