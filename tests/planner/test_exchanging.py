"""What ranks tell each other: how often, how much, and what of it keeps a core busy."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from pydantic import ValidationError

from phalanx.planner import Layout
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cluster.links import Link, all_gather, all_reduce, reduce_scatter, send_seconds
from phalanx.planner.cluster.machine import THIRDS, Exchange, Machine
from phalanx.planner.cost.exchanging import block_exchanges, data_exchange, link_of_axis
from phalanx.planner.cost.step import play_timeline, stage_times, step_time, work_seconds
from phalanx.planner.model.recipe import Recipe
from phalanx.planner.model.shape import ModelShape

SLOW = Link(latency_s=1e-3, bytes_per_s=1e9)
WAITING = Link(latency_s=1e-3, bytes_per_s=1e9, busy=0.25)


def measured(machine: Machine, links: Mapping[Exchange, Link]) -> Machine:
    return replace(machine, overlap=False, exchanges=links)


def test_an_exchange_that_was_measured_counts_inside_a_node_alone(machine: Machine) -> None:
    known = measured(machine, {"sum": SLOW})

    assert link_of_axis(Layout(tp=4), "tp", known, "sum") is SLOW
    assert link_of_axis(Layout(tp=4), "tp", known, "swap") is known.inside
    assert link_of_axis(Layout(tp=8), "tp", known, "sum") is known.between
    assert link_of_axis(Layout(tp=4), "tp", known) is known.inside


def test_sequence_parallel_sends_as_many_bytes_in_twice_as_many_calls(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    known, layout = measured(machine, {"sum": SLOW, "slices": SLOW}), Layout(tp=2)

    whole = block_exchanges(tiny, layout, recipe, known).tensor
    cut = block_exchanges(tiny, layout, replace(recipe, sequence_parallel=True), known).tensor

    # a sum of two ranks has two rounds, a slice that is joined one
    assert cut == pytest.approx(whole)
    size = 32 * 64 // 4 * 64 * 4
    assert whole == pytest.approx(4 * all_reduce(size, 2, SLOW))
    assert cut == pytest.approx(4 * (all_gather(size, 2, SLOW) + reduce_scatter(size, 2, SLOW)))


def test_a_ring_sends_keys_and_values_on_and_their_gradients_home(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    layout, alone = Layout(cp=4, context="ring"), replace(machine, overlap=False)
    one = send_seconds(2 * (32 * 64 // 4 // 4) * 64 * 4, machine.inside)

    found = block_exchanges(tiny, layout, recipe, alone)

    # three sends forward, as many backward, and four of gradients
    assert found.context == pytest.approx(10 * one)
    assert found.hidden == 0.0
    shared = block_exchanges(replace(tiny, kv_heads=2), layout, recipe, alone).context
    bytes_alone = found.context - 10 * machine.inside.latency_s
    assert shared - 10 * machine.inside.latency_s == pytest.approx(bytes_alone * 2 / tiny.heads)


def test_of_a_ring_that_computes_long_enough_the_last_send_shows_alone(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    layout, slow = Layout(cp=4, context="ring"), replace(machine, flops_per_s=1e6)
    one = send_seconds(2 * (32 * 64 // 4 // 4) * 64 * 4, machine.inside)

    found = block_exchanges(tiny, layout, recipe, slow)

    assert found.context == pytest.approx(one)
    assert found.hidden == pytest.approx(9 * one)
    step = step_time(tiny, layout, recipe, slow)
    assert step.hidden >= 8 * recipe.microbatches * found.hidden
    assert step.context == pytest.approx(8 * recipe.microbatches * found.context)


def test_sequence_parallel_completes_the_gradients_of_norms_one_by_one(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    layout = Layout(tp=2)

    bare, _ = data_exchange(tiny, layout, recipe, machine, 0.0)
    settled, _ = data_exchange(tiny, layout, replace(recipe, sequence_parallel=True), machine, 0.0)

    # two norms of two vectors, and the biases of two products
    assert bare == 0.0
    assert settled == pytest.approx(8 * 6 * all_reduce(64 * 4, 2, machine.inside))


def test_a_table_at_both_ends_of_a_pipeline_is_summed(tiny: ModelShape, recipe: Recipe, machine: Machine) -> None:
    tied, _ = data_exchange(tiny, Layout(pp=2), recipe, machine, 0.0)
    untied, _ = data_exchange(replace(tiny, tied=False), Layout(pp=2), recipe, machine, 0.0)

    assert tied == pytest.approx(all_reduce(128 * 64 * 4, 2, machine.inside))
    assert untied == 0.0


def test_blocks_that_share_pay_for_every_call(tiny: ModelShape, recipe: Recipe, machine: Machine) -> None:
    bytes_alone = Link(latency_s=0.0, bytes_per_s=1e9)
    layout = Layout(dp=2, zero=3)

    calls = [
        data_exchange(tiny, layout, recipe, measured(machine, {"gradients": link, "parameters": link}), 0.0)[0]
        for link in (bytes_alone, SLOW)
    ]

    # eight blocks, gathered twice and summed once for each of four microbatches, and what lies around them, gathered
    # once; the first of each shows twice
    assert calls[1] - calls[0] == pytest.approx((8 * 3 + 2) * 4 * 1e-3, rel=0.01)


def test_a_pipeline_sums_shared_gradients_once(tiny: ModelShape, recipe: Recipe, machine: Machine) -> None:
    free = Link(latency_s=0.0, bytes_per_s=1e15)
    known = measured(machine, {"gradients": SLOW, "parameters": free})

    seconds = [
        data_exchange(replace(tiny, tied=False), layout, recipe, known, 0.0)[0]
        for layout in (Layout(dp=2, zero=3), Layout(dp=2, pp=2, zero=3))
    ]

    assert seconds[0] > 4 * seconds[1] > 0


def test_norms_are_no_faster_on_more_tensor_parallel_ranks(tiny: ModelShape, recipe: Recipe, machine: Machine) -> None:
    slow = replace(machine, number_s=1e-6)

    def norms(layout: Layout, how: Recipe) -> float:
        with_norms, without = (step_time(tiny, layout, how, one).compute for one in (slow, machine))
        return with_norms - without

    assert norms(Layout(tp=2), recipe) == pytest.approx(norms(Layout(), recipe))
    assert norms(Layout(tp=2), replace(recipe, sequence_parallel=True)) == pytest.approx(norms(Layout(), recipe) / 2)


def test_what_a_stage_costs_is_for_pipelines_and_tables_are_for_their_ends(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    bare = replace(machine, inside=Link(latency_s=0.0, bytes_per_s=1e15))
    dear = replace(bare, microbatch_s=1e-3, first_s=1e-2, last_s=1e-1)

    def added(layout: Layout) -> list[float]:
        pairs = (stage_times(tiny, layout, recipe, one)[0] for one in (dear, bare))
        return [
            round(
                one.seconds_of("forward")
                + one.seconds_of("backward")
                - other.seconds_of("forward")
                - other.seconds_of("backward"),
                6,
            )
            for one, other in zip(*pairs, strict=True)
        ]

    assert added(Layout()) == [0.11]
    assert added(Layout(tp=2)) == [0.055]
    assert added(Layout(pp=4)) == [0.011, 0.001, 0.001, 0.101]


def test_waiting_for_each_other_costs_ranks_that_share_a_core_nothing(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    layout = Layout(dp=2, tp=2)
    idle = replace(measured(machine, {"sum": WAITING}), memory_bytes_per_s=None)
    crowded, alone = replace(idle, cores=2), step_time(tiny, layout, recipe, idle)

    step = step_time(tiny, layout, recipe, crowded)

    # half of the cores, a quarter of the exchanges at work: computation and idle time of others go on side by side
    assert alone.compute < 0.5 * alone.tensor
    assert step.total_seconds == pytest.approx(alone.total_seconds, rel=0.01)
    busy = replace(idle, exchanges={"sum": SLOW}, cores=2)
    assert step_time(tiny, layout, recipe, busy).total_seconds == pytest.approx(2 * alone.total_seconds, rel=0.01)


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=4), Layout(tp=2), Layout(pp=2), Layout(dp=2, pp=2, zero=2)])
def test_cores_that_never_wait_work_as_long_as_the_step_lasts(
    tiny: ModelShape, recipe: Recipe, machine: Machine, layout: Layout
) -> None:
    crowded = replace(machine, overlap=False, cores=1)

    step = step_time(tiny, layout, recipe, crowded)

    work = work_seconds(tiny, layout, recipe, crowded)
    assert work == pytest.approx(step.total_seconds, rel=0.02)
    assert work_seconds(tiny, layout, recipe, replace(crowded, cores=None)) == pytest.approx(work)


def test_a_link_at_work_is_as_much_faster_as_its_ranks_wait() -> None:
    assert all_gather(1e6, 2, WAITING.without_waiting()) == pytest.approx(all_gather(1e6, 2, WAITING) / 4)
    assert WAITING.without_waiting().busy == 1.0


def test_weights_whose_gradients_take_little_fill_little_of_a_bubble(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    layout = Layout(pp=4, schedule="zero-bubble")

    even, uneven = (
        play_timeline(tiny, layout, replace(recipe, microbatches=8), replace(machine, shares=shares)).bubble_share
        for shares in (THIRDS, (0.4, 0.5, 0.1))
    )

    assert uneven > 1.2 * even
    times, _ = stage_times(tiny, layout, recipe, replace(machine, shares=(0.4, 0.5, 0.1)))
    same, _ = stage_times(tiny, layout, recipe, machine)
    assert times[0].forward + times[0].seconds_of("backward") == pytest.approx(
        same[0].forward + same[0].seconds_of("backward")
    )


def test_a_stage_waits_for_what_was_measured_between_one_that_works_and_one_that_waits(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    quick, slow = (
        step_time(tiny, Layout(pp=4), recipe, one).bubble for one in (machine, measured(machine, {"send": SLOW}))
    )

    # the first microbatch goes through three links and back
    assert slow - quick >= 6 * 1e-3


def test_shares_that_do_not_add_up_are_refused(cluster: Cluster) -> None:
    with pytest.raises(ValidationError, match="add up to 1"):
        Cluster.model_validate({**cluster.model_dump(), "shares": (0.5, 0.5, 0.5)})
