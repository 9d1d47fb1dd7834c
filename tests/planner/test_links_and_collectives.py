"""Collectives on a ring, and links fitted to what a probe measured."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import InputError
from phalanx.planner.cluster import links
from phalanx.planner.cluster.links import (
    Link,
    all_gather,
    all_reduce,
    fit_link,
    fit_machine,
    read_probe,
    reduce_scatter,
    ring_bound,
)

LINK = Link(latency_s=1e-4, bytes_per_s=2e9)


def probe(link: Link) -> list[dict[str, object]]:
    return [
        {"op": "all_reduce", "ranks": ranks, "bytes": size, "seconds": all_reduce(size, ranks, link)}
        for ranks in (2, 4)
        for size in (1e3, 1e5, 1e7)
    ]


@given(ranks=st.integers(2, 64), size=st.floats(1, 1e12))
def test_an_all_reduce_is_two_halves_and_never_faster_than_the_bound(ranks: int, size: float) -> None:
    seconds = all_reduce(size, ranks, LINK)

    assert seconds == pytest.approx(reduce_scatter(size, ranks, LINK) + all_gather(size, ranks, LINK))
    assert seconds >= ring_bound(size, ranks, LINK) == pytest.approx(2 * (ranks - 1) / ranks * size / 2e9)


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"])
def test_one_rank_alone_exchanges_nothing(name: str) -> None:
    assert getattr(links, name)(1e9, 1, LINK) == 0.0


@given(latency=st.floats(1e-7, 1e-2), bandwidth=st.floats(1e6, 1e12))
def test_a_fit_finds_the_link_that_was_measured(latency: float, bandwidth: float) -> None:
    link = Link(latency_s=latency, bytes_per_s=bandwidth)

    found = fit_link(probe(link))

    for ranks, size in ((2, 1e4), (8, 1e8)):
        assert all_reduce(size, ranks, found) == pytest.approx(all_reduce(size, ranks, link), rel=1e-3)


def test_a_probe_without_visible_latency_still_gives_a_bandwidth() -> None:
    # the small message was even quicker than its bytes ask for
    rows = [
        {"op": "all_reduce", "ranks": 2, "bytes": 1e6, "seconds": 0.9e-3},
        {"op": "all_reduce", "ranks": 2, "bytes": 1e7, "seconds": 1e-2},
    ]

    found = fit_link(rows)

    assert found.latency_s == 0.0
    assert 1e9 < found.bytes_per_s < 1.2e9


def test_a_probe_is_read_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    rows = [*probe(LINK), {"op": "broadcast", "ranks": 2, "bytes": 1, "seconds": 9.0}]
    path.write_text(json.dumps({"name": "collectives", "rows": rows}))

    found = read_probe(path)

    assert found.latency_s == pytest.approx(LINK.latency_s)
    assert found.bytes_per_s == pytest.approx(LINK.bytes_per_s)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"rows": 3}',
        '{"rows": []}',
        '{"rows": [{"op": "all_reduce", "ranks": 2, "bytes": 8, "seconds": 1}]}',
        '{"rows": [{"op": "all_reduce", "ranks": 2, "bytes": 8, "seconds": 0}]}',
        '{"rows": [{"op": "all_reduce", "ranks": 1, "bytes": 8, "seconds": 1}]}',
        '{"rows": [{"op": "all_reduce", "ranks": 2, "bytes": "8", "seconds": 1}]}',
    ],
)
def test_a_probe_that_says_nothing_about_the_link_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_text(content)

    with pytest.raises(InputError, match=r"probe\.json"):
        read_probe(path)


def test_ranks_without_a_core_of_their_own_say_nothing_about_the_link(tmp_path: Path) -> None:
    crowded = [{**row, "seconds": 9 * float(str(row["seconds"]))} for row in probe(LINK) if row["ranks"] == 4]
    rows = [row for row in probe(LINK) if row["ranks"] == 2] + crowded
    path = tmp_path / "probe.json"
    path.write_text(json.dumps({"machine": {"cores": 2}, "rows": rows}))

    found = read_probe(path)

    assert found.bytes_per_s == pytest.approx(LINK.bytes_per_s)
    # where there are no others they are used
    assert fit_machine(crowded, 2).bytes_per_s == pytest.approx(LINK.bytes_per_s / 9)
    assert fit_machine(rows, None).bytes_per_s < LINK.bytes_per_s


def test_a_library_that_scatters_sums_by_an_all_reduce_is_found_out() -> None:
    rows = probe(LINK)
    rows += [{**row, "op": "reduce_scatter"} for row in rows]

    found = fit_machine(rows, None)
    ours = [
        {**row, "op": "reduce_scatter_direct", "seconds": row["seconds"] / 2}  # type: ignore[operator]
        for row in rows[:6]
    ]

    assert found.scatter_work == pytest.approx(2.0)
    assert reduce_scatter(1e6, 2, found) == pytest.approx(all_reduce(1e6, 2, LINK))
    assert all_reduce(1e6, 2, found) == pytest.approx(all_reduce(1e6, 2, LINK))
    # the engine's own way goes before the library's
    assert fit_machine([*rows, *ours], None).scatter_work == pytest.approx(1.0)
