import re

import pytest

from phalanx.report.bars import name_bars, part_bars
from phalanx.report.plan_page import _drop_empty_columns
from phalanx.report.svg import make_element
from phalanx.report.tables import make_table


@pytest.mark.parametrize(
    ("cell", "css"),
    [("165.7 MiB", "short"), ("worker-1", "short"), ("a word or two more", None), ("word " * 12, "long")],
)
def test_a_figure_stays_with_its_unit_and_a_sentence_gets_room(cell, css):
    found = re.search(r"<td([^>]*)>", make_table(["Head"], [[cell]]))[1]

    assert found == ("" if css is None else f' class="{css}"')


def test_markup_is_put_into_a_cell_as_it_is():
    assert '<td><code class="short">x</code></td>' in make_table(
        ["Head"], [[make_element("code", {"class": "short"}, "x")]]
    )


def test_a_column_that_says_nothing_in_every_row_is_left_out():
    heads, rows = _drop_empty_columns(
        ("Layout", "Sent", "Cost"), [["dp=2", "nothing", "1"], ["tp=2", "nothing", "nothing"]], "nothing"
    )

    assert (heads, rows) == (["Layout", "Cost"], [["dp=2", "1"], ["tp=2", "nothing"]])


def bar_starts(drawn):
    return {float(at) for at in re.findall(r'class="bar [^"]*" x="([\d.]+)"', drawn)}


def test_bars_begin_where_the_longest_name_ends():
    short, long = (bar_starts(name_bars([("a", 1.0), (name, 1.0)], str, "label")) for name in ("bc", "b" * 60))

    assert min(short) < 40 < 250 < min(long) < 300


@pytest.mark.parametrize(("limit", "is_drawn"), [(3.0, True), (5.0, False)])
def test_a_limit_far_beyond_the_bars_is_told_and_not_drawn(limit, is_drawn):
    drawn = part_bars([("dp=2", {"parameters": 1.0})], lambda value: f"{value:g} GiB", "label", limit)

    assert f"limit {limit:g} GiB" in drawn
    assert ('class="level"' in drawn) is is_drawn
    assert ("far to the right" in drawn) is not is_drawn
