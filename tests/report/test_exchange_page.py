"""The page of measured exchanges: what was measured is drawn beside the bound, and nothing is fetched."""

import re

import pytest

from phalanx.errors import InputError
from phalanx.report.exchange_page import exchange_chart, render_exchanges, write_exchanges


def row(op, ranks, seconds, bound=None):
    size = 4 * 2**20
    over = None if bound is None else seconds / bound
    return {
        "op": op,
        "ranks": ranks,
        "bytes": size,
        "seconds": seconds,
        "cpu_s": seconds,
        "bound_s": bound,
        "over_bound": over,
    }


@pytest.fixture
def result():
    rows = [row("all_reduce", n, 0.01 * n, 0.005 * n) for n in (2, 4)]
    rows += [row("gather_to_one", n, 0.03 * n, 0.005 * n) for n in (2, 4)]
    rows.append(row("broadcast", 2, 0.001))
    return {"machine": {"cpu": "<a CPU>", "cores": 2}, "rows": rows}


def test_the_page_fetches_nothing_and_escapes_what_it_was_given(result):
    page = render_exchanges(result)

    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    assert "&lt;a CPU&gt;" in page
    assert page.count("<svg") == 1


def test_sums_are_drawn_and_other_exchanges_stand_in_the_table(result):
    chart = exchange_chart(result["rows"], 4 * 2**20)

    assert "gather to one rank, 4 ranks: 120 ms" in chart
    assert "bound by bandwidth" in chart
    assert "halving" not in chart
    assert "broadcast" not in chart
    assert "broadcast" in render_exchanges(result)


def test_a_page_that_cannot_be_written_is_said(result, tmp_path):
    with pytest.raises(InputError, match="cannot be written"):
        write_exchanges(tmp_path / "missing" / "page.html", result)
