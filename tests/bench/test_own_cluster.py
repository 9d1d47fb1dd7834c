"""This machine as a cluster: what is found again of times that were made up."""

import pytest

from phalanx.bench.layouts import SHIFTS, small_run
from phalanx.bench.own_cluster import Probe, cluster_of
from phalanx.bench.parallel_plan import beside, plan_layout
from phalanx.parallel import ParallelConfig
from phalanx.planner.collectives import all_reduce
from phalanx.planner.compute import forward_flops
from phalanx.planner.links import Link
from phalanx.planner.shape import shape_of

PEAK, BLOCK, HEAD = 9e10, 6e10, 4e10
BLOCK_S, FIXED_S, UPDATE_S, SHARING_S = 2e-3, 5e-3, 1e-2, 3e-3
LINK = Link(latency_s=1e-4, bytes_per_s=2e9)


@pytest.fixture
def run():
    return small_run()


@pytest.fixture
def probe(run):
    shape, tokens = shape_of(run.model.architecture), run.data.sequence_length
    flops = forward_flops(shape, tokens)

    def seconds(blocks, head, rows):
        block = BLOCK_S + rows * tokens * 3 * (flops.block + flops.scores) / BLOCK
        return blocks * block + (FIXED_S + rows * tokens * 3 * flops.head / HEAD if head else 0.0)

    timed = [
        {"blocks": blocks, "head": head, "rows": rows, "wall_s": seconds(blocks, head, rows)}
        for rows in (1, 4)
        for blocks, head in ((2, False), (7, False), (8, True))
    ]
    timed = [{**one, "cpu_s": one["wall_s"] / 2} for one in timed]
    update = {"wall_s": UPDATE_S, "cpu_s": UPDATE_S / 2}
    exchanges = [
        {"op": op, "ranks": 2, "bytes": size, "seconds": all_reduce(size, 2, LINK), "cpu_s": all_reduce(size, 2, LINK)}
        for op in ("all_reduce", "reduce_scatter_direct")
        for size in (10_000, 10_000_000)
    ]
    sharing = {"wall_s": SHARING_S, "cpu_s": SHARING_S / 2}
    return Probe([timed, timed], [update, update], [sharing, sharing], exchanges, PEAK)


def test_speeds_and_fixed_costs_are_found_again(probe, run):
    cluster = cluster_of(probe, run, 4, "wall_s")

    assert cluster.efficiency == pytest.approx(BLOCK / PEAK)
    assert cluster.head_efficiency == pytest.approx(HEAD / PEAK)
    assert (cluster.block_s, cluster.microbatch_s) == pytest.approx((BLOCK_S, FIXED_S))
    assert cluster.shared_block_s == pytest.approx(SHARING_S)
    assert (cluster.inside.latency_s, cluster.inside.bytes_per_s) == pytest.approx((1e-4, 2e9))
    assert cluster.inside.scatter_work == pytest.approx(2.0)
    assert (cluster.cores, cluster.overlap, cluster.num_devices) == (2, False, 4)


def test_cpu_seconds_are_those_of_one_rank_and_wait_for_no_core(probe, run):
    cluster = cluster_of(probe, run, 4, "cpu_s")

    assert cluster.cores is None
    assert cluster.block_s == pytest.approx(BLOCK_S / 2)
    # two ranks used as much together as one waited
    assert cluster.inside.bytes_per_s == pytest.approx(4e9)


def test_every_layout_that_is_measured_can_be_planned(probe, run):
    configs = [config for shift in SHIFTS for config in shift.configs() if not shift.lossy]

    for config in configs:
        on_wall, on_cpu = (cluster_of(probe, run, config.world, clock) for clock in ("wall_s", "cpu_s"))
        planned = plan_layout(run, config, on_wall, on_cpu)
        row = beside(planned, planned.step_s, planned.cpu_s, config.world)
        assert (row["step_ratio"], row["cpu_ratio"]) == pytest.approx((1.0, 1.0))
        assert row["idle"] == pytest.approx(row["planned_idle"])
        assert (planned.bubble is None) == (config.pp == 1)
    assert len(configs) >= 12


def test_the_planner_cuts_pipelines_where_the_engine_does(run):
    from phalanx.models.layout import partition
    from phalanx.planner.memory import stage_layers

    shape = shape_of(run.model.architecture)
    head = shape.head_matrix / shape.layer_matrix

    for stages in (2, 4):
        specs = partition(shape.layers, stages, None, 0.0, head)
        assert [spec.end_layer - spec.first_layer for spec in specs] == list(
            stage_layers(shape, run.data.sequence_length, stages)
        )


def test_a_layout_without_a_pipeline_has_no_bubble(probe, run):
    cluster = cluster_of(probe, run, 2, "wall_s")

    assert plan_layout(run, ParallelConfig(dp=2), cluster, cluster).bubble is None
