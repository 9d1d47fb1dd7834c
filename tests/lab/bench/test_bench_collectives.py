"""Exchanges between real ranks, and the link that the planner reads out of them."""

import json

import pytest

from phalanx.cli.planning.answer import planned_cluster
from phalanx.errors import TrainingError
from phalanx.lab.bench import BENCHES
from phalanx.lab.bench.parallel.collectives import exchange_rows, summarise_collectives
from phalanx.lab.bench.parallel.ranks import RankForkServer

OPERATIONS = (
    "all_reduce",
    "all_reduce_halving_doubling",
    "all_reduce_ring",
    "all_reduce_direct",
    "gather_to_one",
    "reduce_scatter",
    "reduce_scatter_direct",
    "all_gather",
    "all_gather_direct",
    "all_to_all",
    "broadcast",
    "send",
)
SIZES = (4096, 2**20)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    with RankForkServer(tmp_path_factory.mktemp("ranks") / "host") as host:
        yield host


@pytest.fixture(scope="module")
def result():
    """The summary of rows that a machine of 1 GB/s and 10 us would give."""
    seconds = {size: 1e-5 + size / 1e9 for size in SIZES}
    rows = [
        {
            "op": op,
            "ranks": 2,
            "bytes": size,
            "seconds": seconds[size],
            "best_s": seconds[size],
            "cpu_s": 1.0,
            "times": 9,
        }
        for op in OPERATIONS
        for size in SIZES
    ]
    return summarise_collectives(rows, None, quick=True)


@pytest.mark.slow
def test_every_operation_is_timed_at_every_size(host):
    result = summarise_collectives(exchange_rows(host, 2, SIZES, OPERATIONS), None, quick=True)

    json.dumps(result, allow_nan=False)
    assert result["link"]["bytes_per_s"] > 0
    assert [(row["op"], row["bytes"]) for row in result["rows"]] == [(op, size) for op in OPERATIONS for size in SIZES]
    assert all(0 < row["best_s"] <= row["seconds"] and row["cpu_s"] > 0 for row in result["rows"])


def test_the_bound_is_beside_what_sums_and_nothing_else(result):
    sums = {"all_reduce", "all_reduce_halving_doubling", "all_reduce_ring", "all_reduce_direct", "gather_to_one"}

    assert {row["op"] for row in result["rows"] if row["bound_s"] is not None} == sums
    for row in result["rows"]:
        if row["bound_s"] is not None:
            # two ranks send a whole tensor each
            assert row["bound_s"] == pytest.approx(row["bytes"] / result["link"]["bytes_per_s"])


def test_the_planner_plans_with_the_link_that_was_measured(result, tmp_path):
    path = tmp_path / "probe.json"
    path.write_text(json.dumps(result))

    cluster = planned_cluster(None, [2], path)

    assert cluster.inside.model_dump() == pytest.approx(result["link"])
    assert cluster.between == cluster.inside


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.slow
def test_our_own_exchanges_sum_what_every_rank_has(host, world):
    with host.make_crew(f"{world} ranks", "exchange", world) as crew:
        for way in ("all_reduce_halving_doubling", "gather_to_one", "direct parts", "all_reduce_direct"):
            answers = crew.ask_all(check=way, numbers=64)

            assert [answer["worst"] for answer in answers] == [0.0] * world


@pytest.mark.slow
def test_a_rank_that_fails_is_named_and_others_are_not_waited_for(host):
    with host.make_crew("two", "exchange", 2) as crew:
        with pytest.raises(TrainingError, match=r"two, rank \d: KeyError: 'whisper'"):
            crew.ask_all(op="whisper", bytes=4, times=1)
        with pytest.raises(TrainingError, match="two, rank"):
            crew.ask_all(op="broadcast", bytes=4, times=1)


def test_it_is_on_the_command_line():
    assert "collectives" in BENCHES
