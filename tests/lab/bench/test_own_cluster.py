"""This machine as a cluster: what is found again of times that were made up."""

from dataclasses import replace
from typing import get_args

import pytest

from phalanx.lab.bench.parallel.layouts import SHIFTS, small_run
from phalanx.lab.bench.parallel.own_cluster import Probe, cluster_of
from phalanx.lab.bench.parallel.parallel_plan import compare_with_plan, plan_layout
from phalanx.parallel import ParallelConfig
from phalanx.planner.cluster.links import Link, all_gather, all_reduce, all_to_all, send_seconds
from phalanx.planner.cluster.machine import Exchange
from phalanx.planner.model.compute import forward_flops
from phalanx.planner.model.read import shape_of

PEAK, BLOCK, HEAD = 9e10, 6e10, 4e10
BLOCK_S, FIRST_S, LAST_S, UPDATE_S, STAGE_S, NORM_S = 2e-3, 4e-3, 5e-3, 1e-2, 6e-3, 1e-9
LINK = Link(latency_s=1e-4, bytes_per_s=2e9)
STREAM = Link(latency_s=1e-3, bytes_per_s=1e9, busy=0.5)
TAKES = {
    "sum": all_reduce,
    "slices": all_gather,
    "swap": all_to_all,
    "gradients": all_gather,
    "parameters": all_gather,
    "send": lambda size, _, link: send_seconds(size, link),
}
SHARES = (0.25, 0.5, 0.25)


@pytest.fixture
def run():
    return small_run()


@pytest.fixture
def probe(run):
    shape, tokens = shape_of(run.model.architecture), run.data.sequence_length
    flops = forward_flops(shape, tokens)

    def seconds(blocks, head, rows):
        products = 3 * (flops.block + flops.scores) / BLOCK
        block = BLOCK_S + rows * tokens * (products + 2 * shape.hidden * NORM_S)
        return FIRST_S + blocks * block + (LAST_S + rows * tokens * 3 * flops.head / HEAD if head else 0.0)

    timed = [
        {"blocks": blocks, "head": head, "rows": rows, "cpu_s": seconds(blocks, head, rows)}
        for rows in (1, 4)
        for blocks, head in ((2, False), (7, False), (8, True))
    ]
    # others are at work on the machine
    timed = [{**one, "wall_s": 3 * one["cpu_s"]} for one in timed]
    exchanges = [
        {"op": op, "ranks": 2, "bytes": size, "seconds": all_reduce(size, 2, LINK), "cpu_s": all_reduce(size, 2, LINK)}
        for op in ("all_reduce", "reduce_scatter_direct")
        for size in (10_000, 10_000_000)
    ]
    streams = [
        {"op": op, "bytes": size, "wall_s": takes(size, 2, STREAM), "cpu_s": takes(size, 2, STREAM.without_waiting())}
        for op, takes in TAKES.items()
        for size in (60_000, 400_000)
    ]
    streams.append({"op": "stage", "bytes": 400_000, "wall_s": STAGE_S, "cpu_s": STAGE_S})
    update, norms = ({"wall_s": 3 * value, "cpu_s": value} for value in (UPDATE_S, NORM_S))
    shares = dict(zip(("forward", "inputs", "weights"), SHARES, strict=True))
    return Probe([timed, timed], [update, update], [norms, norms], [shares, shares], exchanges, streams, PEAK)


def test_speeds_and_fixed_costs_are_found_again(probe, run):
    cluster = cluster_of(probe, run, 4)

    assert cluster.efficiency == pytest.approx(BLOCK / PEAK)
    assert cluster.head_efficiency == pytest.approx(HEAD / PEAK)
    assert (cluster.block_s, cluster.first_s, cluster.last_s) == pytest.approx((BLOCK_S, FIRST_S, LAST_S))
    assert (cluster.microbatch_s, cluster.number_s) == pytest.approx((STAGE_S, 2 * NORM_S))
    assert cluster.shares == SHARES
    assert (cluster.inside.latency_s, cluster.inside.bytes_per_s) == pytest.approx((1e-4, 2e9))
    assert (cluster.inside.scatter_work, cluster.inside.busy) == pytest.approx((2.0, 0.5))
    assert (cluster.cores, cluster.overlap, cluster.num_devices) == (2, False, 4)


@pytest.mark.parametrize("kind", TAKES)
def test_an_exchange_takes_what_it_took_in_the_midst_of_computation(probe, run, kind):
    link = cluster_of(probe, run, 2).exchanges[kind]

    assert (link.latency_s, link.bytes_per_s, link.busy) == pytest.approx((1e-3, 1e9, 0.5))


def test_a_machine_of_one_core_has_no_exchanges_of_its_own(probe, run):
    cluster = cluster_of(replace(probe, streams=[]), run, 2)

    assert (cluster.exchanges, cluster.microbatch_s) == ({}, 0.0)


def test_the_probe_knows_every_exchange_that_the_planner_does():
    assert set(TAKES) == set(get_args(Exchange))


def test_every_layout_that_is_measured_can_be_planned(probe, run):
    configs = [config for shift in SHIFTS for config in shift.parallel_configs() if not shift.lossy]

    for config in configs:
        planned = plan_layout(run, config, cluster_of(probe, run, config.num_ranks))
        row = compare_with_plan(planned, planned.step_s, planned.cpu_s, planned.bubble, config.num_ranks)
        assert (row["step_ratio"], row["cpu_ratio"]) == pytest.approx((1.0, 1.0))
        assert row["idle"] == pytest.approx(row["planned_idle"])
        assert row["bubble_ratio"] == (None if config.pp == 1 else pytest.approx(1.0))
        # cores do no more than they can
        assert planned.cpu_s <= 1.000001 * planned.step_s * min(2, config.num_ranks)
    assert len(configs) >= 12


def test_one_rank_takes_what_was_timed(probe, run):
    planned = plan_layout(run, ParallelConfig(), cluster_of(probe, run, 1))

    whole = next(one["cpu_s"] for one in probe.timed[0] if one["head"] and one["rows"] == 4)
    assert planned.step_s == pytest.approx(run.train.microbatches * whole + UPDATE_S)
    assert planned.idle == pytest.approx(0.0, abs=1e-6)


def test_the_planner_cuts_pipelines_where_the_engine_does(run):
    from phalanx.models.layout import partition_layers
    from phalanx.planner.cost.memory import stage_layers

    shape = shape_of(run.model.architecture)
    head = shape.head_matrix / shape.layer_matrix

    for stages in (2, 4):
        specs = partition_layers(shape.layers, stages, None, 0.0, head)
        assert [spec.end_layer - spec.first_layer for spec in specs] == list(
            stage_layers(shape, run.data.sequence_length, stages)
        )


def test_a_layout_without_a_pipeline_has_no_bubble(probe, run):
    assert plan_layout(run, ParallelConfig(dp=2), cluster_of(probe, run, 2)).bubble is None


def test_a_bubble_that_was_not_measured_has_no_ratio(probe, run):
    config = ParallelConfig(pp=2)
    planned = plan_layout(run, config, cluster_of(probe, run, 2))

    row = compare_with_plan(planned, 1.0, 1.0, None, 2)

    assert (row["bubble"], row["bubble_ratio"]) == (None, None)
    assert row["planned_bubble"] == planned.bubble
