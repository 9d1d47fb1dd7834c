"""Groups that are replicas of each other, and islands that train apart: shares, bytes, seconds, refusals, run files."""

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.parallel import ParallelConfig
from phalanx.planner import Layout, describe_refusal, nearest_valid_layout, shape_of
from phalanx.planner.cluster.catalog import known_clusters, known_models
from phalanx.planner.cluster.hardware import Cluster
from phalanx.planner.cluster.links import Link, all_gather, all_reduce
from phalanx.planner.cluster.machine import Machine
from phalanx.planner.cost.estimate import estimate_layout
from phalanx.planner.cost.exchanging import count_traffic, data_exchange, link_of_axis
from phalanx.planner.cost.memory import worst_rank
from phalanx.planner.cost.step import step_time, work_seconds
from phalanx.planner.layout import parse_layout
from phalanx.planner.model.adapter import Adapter
from phalanx.planner.model.recipe import OuterLoop, Recipe
from phalanx.planner.model.shape import ModelShape
from phalanx.planner.search.answer import answer_question
from phalanx.planner.search.candidates import candidate_layouts
from phalanx.planner.search.question import Question
from phalanx.planner.search.rank import rank_layouts
from phalanx.planner.search.run_file import run_text

WORKING = Recipe(sequences=32, sequence_length=64, microbatches=4)
EVERY = 10
PLAIN, ROUNDED = OuterLoop(EVERY), OuterLoop(EVERY, rounds=True)
WIDE = Link(latency_s=0.05, bytes_per_s=1e7)


@pytest.fixture
def apart(recipe: Recipe) -> Recipe:
    return replace(recipe, outer=PLAIN)


@pytest.mark.parametrize("zero", [2, 3])
def test_a_rank_of_a_group_has_what_one_of_that_many_copies_has(tiny: ModelShape, recipe: Recipe, zero: int) -> None:
    hybrid = worst_rank(tiny, Layout(dp=8, zero=zero, replicas=2), recipe)

    # the same rows on each rank
    assert hybrid == worst_rank(tiny, Layout(dp=4, zero=zero), replace(recipe, sequences=recipe.sequences // 2))


def test_parameters_travel_inside_a_group_and_gradients_between_groups_once(tiny: ModelShape, recipe: Recipe) -> None:
    alone, hybrid = (count_traffic(tiny, Layout(dp=dp, zero=3, replicas=dp // 4), recipe) for dp in (4, 8))

    assert alone.groups == 0
    assert hybrid.copies == alone.copies
    assert hybrid.groups == 2 * 1 / 2 * 4 * tiny.num_parameters / 4


def test_what_a_group_exchanges_stays_on_its_node(tiny: ModelShape, recipe: Recipe, machine: Machine) -> None:
    bare = replace(machine, overlap=False, memory_bytes_per_s=None)
    inner = data_exchange(tiny, Layout(dp=4, zero=3), recipe, bare, 0.0)[0]

    hybrid = data_exchange(tiny, Layout(dp=8, zero=3, replicas=2), recipe, bare, 0.0)[0]

    # nine calls, one for each block and one for what is around them
    between = all_reduce(tiny.num_parameters, 2, bare.between) + 8 * 2 * bare.between.latency_s
    assert hybrid - inner == pytest.approx(between)
    assert hybrid < data_exchange(tiny, Layout(dp=8, zero=3), recipe, bare, 0.0)[0]


def test_gradients_between_groups_are_hidden_behind_the_last_backward_pass_alone(
    gpt2: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    layout, slow = Layout(dp=8, zero=3, replicas=2), replace(machine, between=Link(latency_s=0.0, bytes_per_s=1e8))
    # a quarter of the gradients, in thirteen calls
    quick, slowly = (
        4 * gpt2.num_parameters / 4 / rate + 13 * 2 * latency for rate, latency in ((1e9, 1e-5), (1e8, 0.0))
    )
    most = 1.2 * 2 / 3 / 4

    inside, between = (data_exchange(gpt2, layout, recipe, one, 1.2) for one in (machine, slow))

    assert between[1] - inside[1] == pytest.approx(most - quick * 12 / 13)
    assert sum(between) - sum(inside) == pytest.approx(slowly - quick)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(dp=4, replicas=0), "replicas=0: expected a whole number of at least 1"),
        (Layout(dp=4, islands=0), "islands=0: expected a whole number of at least 1"),
        (Layout(dp=4, replicas=2), "replicas=2 needs zero=2 or 3, found zero=0; leave replicas out"),
        (Layout(dp=4, zero=3, replicas=3), "replicas=3 does not divide dp=4; change one of them"),
        (Layout(dp=4, zero=3, replicas=4), "replicas=4 leaves each group one copy, which shares nothing"),
        (Layout(dp=8, zero=3, replicas=4, islands=4), "replicas=4 does not divide dp=8 on 4 islands"),
        (Layout(dp=4, islands=3), "islands=3 does not divide dp=4; change one of them"),
        (Layout(dp=4, zero=1, islands=4), "zero=1 shares what the copies of an island have, and with islands=4"),
    ],
)
def test_groups_that_cannot_work_are_refused(tiny: ModelShape, layout: Layout, reason: str) -> None:
    found = describe_refusal(layout, tiny, WORKING)

    assert found is not None
    assert reason in found


@settings(deadline=None)
@given(
    dp=st.integers(1, 8),
    cp=st.integers(1, 2),
    zero=st.integers(0, 3),
    replicas=st.integers(1, 4),
    islands=st.integers(1, 4),
)
def test_the_planner_refuses_the_groups_that_the_run_file_refuses(
    dp: int, cp: int, zero: int, replicas: int, islands: int
) -> None:
    layout = Layout(dp=dp, cp=cp, zero=zero, replicas=replicas, islands=islands)
    outer = {"every": 1, "islands": islands} if islands > 1 else None

    reason = describe_refusal(layout, shape_of(TINY), Recipe(sequences=8 * dp, sequence_length=64))

    try:
        config = ParallelConfig.model_validate(
            {"dp": dp, "cp": cp, "zero": zero, "replicas": replicas, **({"outer": outer} if outer else {})}
        )
    except ValueError:
        # one rank that shares with nobody is as good as one without ZeRO, which the planner never proposes with it
        assert reason is not None or (dp * cp == 1 and zero)
    else:
        assert reason is None
        assert config.planned_layout == layout
        assert (config.planned_layout.num_partners, config.planned_layout.num_ranks) == (
            config.copies_per_island,
            config.num_ranks,
        )


TINY = {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 8, "vocab_size": 128, "n_positions": 64}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (Layout(dp=4, tp=3, zero=3, replicas=2), Layout(dp=4, tp=2, zero=3, replicas=2)),
        (Layout(dp=4, zero=3, replicas=4), Layout(dp=4, zero=3)),
        (Layout(dp=4, tp=3, islands=2), Layout(dp=4, tp=2, islands=2)),
        # every copy is an island, however many there are
        (Layout(dp=3, islands=3), Layout(dp=2, islands=2)),
        (Layout(dp=4, islands=3), None),
    ],
)
def test_the_nearest_layout_keeps_islands_and_groups_where_it_can(
    tiny: ModelShape, asked: Layout, found: Layout | None
) -> None:
    assert nearest_valid_layout(asked, tiny, WORKING) == found


def test_groups_as_large_as_a_node_are_tried_and_the_run_s_own_layout(tiny: ModelShape) -> None:
    bare, own = set(candidate_layouts(8, 4, None)), Layout(dp=8, zero=3, replicas=4)

    found = set(candidate_layouts(8, 4, None, own))

    assert found == {*bare, own}
    assert {one.replicas for one in bare} == {1, 2}
    assert all(one.dp * one.cp * one.tp // one.replicas <= 4 for one in bare if one.replicas > 1)
    assert set(candidate_layouts(4, 4, None, own)) == set(candidate_layouts(4, 4, None))


def test_islands_are_parts_of_every_layout_of_such_a_run(tiny: ModelShape, apart: Recipe, cluster: Cluster) -> None:
    each, two = (
        rank_layouts(tiny, replace(apart, outer=one), cluster, 8) for one in (PLAIN, OuterLoop(EVERY, islands=2))
    )

    assert {one.layout.islands == one.layout.dp > 1 for one in each.valid} == {True}
    assert {one.layout.islands for one in two.valid} == {2}
    refused = {one.layout.dp: one.reason for one in two.refused if one.layout.zero == 0}
    assert refused[1] == "outer joins islands of data parallel copies, and dp=1; raise dp"


@pytest.mark.parametrize(
    ("outer", "layout", "reason"),
    [
        (None, Layout(dp=4, islands=2), r"islands=2: nothing says when they are joined; plan a run file with \[paral"),
        (OuterLoop(EVERY, islands=2), Layout(dp=4, islands=4), "islands=4: the run file has 2; remove it"),
    ],
)
def test_islands_that_are_not_those_of_the_run_are_refused(
    tiny: ModelShape, recipe: Recipe, cluster: Cluster, outer: OuterLoop | None, layout: Layout, reason: str
) -> None:
    asked = Question("tiny", tiny, replace(recipe, outer=outer), cluster, (4,), fixed=layout)

    with pytest.raises(ConfigError, match=reason):
        answer_question(asked).require_best()


def test_a_layout_to_judge_has_the_islands_of_the_run(tiny: ModelShape, apart: Recipe, cluster: Cluster) -> None:
    asked = Question("tiny", tiny, apart, cluster, (4,)).with_options(layout="dp=4", by="speed", gpus=(), tokens=None)

    assert asked.fixed == Layout(dp=4, islands=4)
    assert parse_layout("dp=4,zero=3,replicas=2") == Layout(dp=4, zero=3, replicas=2)
    assert str(Layout(dp=8, zero=3, replicas=2, islands=2)) == "dp=8 zero=3 replicas=2 islands=2"


@pytest.mark.parametrize(("outer", "numbers"), [(PLAIN, 2), (ROUNDED, 3)])
def test_islands_keep_an_anchor_a_momentum_and_what_rounding_lost(
    tiny: ModelShape, recipe: Recipe, outer: OuterLoop, numbers: int
) -> None:
    layouts = [Layout(dp=4, islands=4), Layout(dp=4, islands=2, zero=1), Layout(dp=4, islands=2, zero=2)]

    kept = [worst_rank(tiny, layout, replace(recipe, outer=outer)).outer for layout in layouts]

    whole = numbers * 4 * tiny.num_parameters
    assert kept == [whole, whole, whole // 2]
    moved = worst_rank(tiny, layouts[2], replace(recipe, outer=outer, offload="all"))
    assert (moved.outer, moved.host) == (0, whole // 2 + 16 * tiny.num_parameters // 2)


def test_islands_exchange_no_gradient_and_are_joined_every_so_many_steps(
    tiny: ModelShape, apart: Recipe, machine: Machine
) -> None:
    far, calls = replace(machine, island_link=WIDE, memory_bytes_per_s=None), 8 * 12 + 4

    step = step_time(tiny, Layout(dp=4, islands=4), apart, far)

    seconds = all_reduce(4 * tiny.num_parameters, 4, WIDE) + (calls - 1) * 6 * WIDE.latency_s
    assert (step.data, step.hidden) == (0.0, 0.0)
    assert step.outer == pytest.approx(seconds / EVERY)
    assert count_traffic(tiny, Layout(dp=4, islands=4), apart).islands == 2 * 3 / 4 * 4 * tiny.num_parameters / EVERY
    assert work_seconds(tiny, Layout(dp=4, islands=4), apart, far) > 4 * step.outer


def test_bytes_instead_of_numbers_are_gathered_with_their_scales(
    tiny: ModelShape, recipe: Recipe, machine: Machine
) -> None:
    far, layout = replace(machine, island_link=WIDE, memory_bytes_per_s=None), Layout(dp=2, islands=2)
    rounded, calls = replace(recipe, outer=ROUNDED), 2 * (8 * 12 + 4)
    size = tiny.num_parameters * (1 + 4 / 1024)

    step = step_time(tiny, layout, rounded, far)

    assert step.outer == pytest.approx((all_gather(2 * size, 2, WIDE) + (calls - 1) * WIDE.latency_s) / EVERY)
    assert count_traffic(tiny, layout, rounded).islands == pytest.approx(size / EVERY)


def test_adapters_of_islands_are_all_that_is_joined(tiny: ModelShape, recipe: Recipe) -> None:
    thin, layout = replace(recipe, outer=PLAIN, adapter=Adapter(4)), Layout(dp=2, islands=2)

    assert worst_rank(tiny, layout, thin).outer == 2 * 4 * 8 * 4 * 256
    assert count_traffic(tiny, layout, thin).islands == 4 * 8 * 4 * 256 / EVERY


def test_copies_of_an_island_exchange_as_many_as_they_are(tiny: ModelShape, apart: Recipe, machine: Machine) -> None:
    recipe = replace(apart, outer=OuterLoop(EVERY, islands=2))

    whole, part = (
        data_exchange(tiny, layout, recipe, replace(machine, overlap=False), 0.0)[0]
        for layout in (Layout(dp=4), Layout(dp=8, islands=2))
    )

    assert whole == part > 0


def test_the_slow_link_is_that_of_the_cluster_or_the_one_that_islands_cross(
    tiny: ModelShape, apart: Recipe, cluster: Cluster, machine: Machine
) -> None:
    near, across = Layout(dp=4, islands=2), Layout(dp=8, islands=2)

    assert link_of_axis(near, "island", machine) is machine.inside
    assert link_of_axis(across, "island", machine) is machine.between
    assert link_of_axis(across, "dp", machine) is machine.inside
    assert link_of_axis(near, "island", replace(machine, island_link=WIDE)) is WIDE
    far = cluster.model_copy(update={"islands": WIDE})
    slow, quick = (
        estimate_layout(tiny, near, replace(apart, outer=OuterLoop(EVERY, 2)), one).step for one in (far, cluster)
    )
    assert slow.outer > 100 * quick.outer


def test_over_a_slow_link_islands_beat_copies_that_talk_in_every_step(gpt2: ModelShape, cluster: Cluster) -> None:
    slow = cluster.model_copy(update={"per_node": 1, "between": Link(latency_s=0.01, bytes_per_s=1e8)})
    recipe = Recipe(32, 512)

    together = estimate_layout(gpt2, Layout(dp=4), recipe, slow).step
    apart = estimate_layout(gpt2, Layout(dp=4, islands=4), replace(recipe, outer=OuterLoop(50)), slow).step

    assert apart.data == 0
    assert apart.outer < 0.2 * together.data


def test_groups_of_a_node_win_over_a_slow_network(gpt2: ModelShape, cluster: Cluster) -> None:
    found = rank_layouts(gpt2, Recipe(8, 256), cluster, 8)

    speeds = {one.layout: one.tokens_per_s for one in found.valid}
    assert speeds[Layout(dp=8, zero=3, replicas=2)] > speeds[Layout(dp=8, zero=3)]


def test_a_mixed_pool_is_refused(apart: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"found parallel\.outer and pools of different devices"):
        rank_layouts(known_models()["gpt2"], apart, known_clusters()["paper-pool"], 4)


@pytest.mark.parametrize("layout", [Layout(dp=8, zero=3, replicas=2), Layout(dp=8, islands=2, zero=2)])
def test_groups_and_islands_are_written_into_the_run_file(
    tiny: ModelShape, recipe: Recipe, cluster: Cluster, layout: Layout
) -> None:
    outer = {"every": EVERY, "islands": 2, "lr": 0.5, "compression": "int8"}
    before = {"dp": 2, "compile": True, "restarts": 1, **({"outer": outer} if layout.islands > 1 else {})}
    planned = replace(recipe, outer=OuterLoop(EVERY, 2, rounds=True) if layout.islands > 1 else None)
    found = estimate_layout(tiny, layout, planned, cluster)

    written = tomllib.loads(run_text({"parallel": before}, found))["parallel"]

    config = ParallelConfig.model_validate(written)
    assert config.planned_layout == layout
    assert config.restarts == 1
    assert (config.outer is None) == (layout.islands == 1)
    assert config.outer is None or config.outer.model_dump(exclude_unset=True) == outer


def test_a_row_says_groups_islands_and_bytes(tiny: ModelShape, apart: Recipe, cluster: Cluster) -> None:
    row = estimate_layout(tiny, Layout(dp=4, islands=4), apart, cluster).estimate_row()

    assert (row["replicas"], row["islands"], row["sent_copies_bytes"]) == (1, 4, 0.0)
    assert row["sent_islands_bytes"] == 2 * 3 / 4 * 4 * tiny.num_parameters / EVERY
    assert row["outer_gib"] * 2**30 == 8 * tiny.num_parameters
    assert row["outer_s"] > 0
