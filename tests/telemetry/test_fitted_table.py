"""A table that does not fit becomes a list: no name is cut, no number is broken, no text steers the terminal."""

import io

import pytest
from rich.console import Console

from phalanx.telemetry import FittedTable, PartyRow
from phalanx.telemetry.parties import parties_table

WIDTHS = [60, 80, 120]
NOW = 1_000_000
LONG = [f"university-hospital-of-the-northern-lands-{end}" for end in ("one", "two")]


def shown(part, width):
    text = io.StringIO()
    Console(file=text, width=width).print(part)
    return text.getvalue()


def table(names):
    rows = [(name, f"{10**9 + number:,}", "serving 1 2") for number, name in enumerate(names)]
    return FittedTable(("party", "parameters", "state"), rows, title="2 parties", left=("party", "state"))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("names", [("a", "b"), LONG], ids=["short names", "long names"])
def test_every_cell_is_whole_in_one_line(names, width):
    lines = shown(table(names), width).splitlines()

    for number, name in enumerate(names):
        assert any(name in line for line in lines)
        assert any(f"{10**9 + number:,}" in line for line in lines)
    assert all(len(line) <= width for line in lines)


def test_it_is_a_table_exactly_where_the_table_has_room():
    needed = max(map(len, shown(table(LONG), 200).splitlines()))

    assert "┃" in shown(table(LONG), needed)
    # without lines there is room for it yet, and for every head in one row
    bare = shown(table(LONG), needed - 1)
    assert "┃" not in bare and "party" in bare.splitlines()[1] and "parameters" in bare.splitlines()[1]
    width = max(len(line.rstrip()) for line in bare.splitlines())
    assert f"party {LONG[0]}" in shown(table(LONG), width - 1)


def test_a_cell_that_is_empty_has_no_line_in_the_list():
    part = FittedTable(("name", "size", "note"), [(LONG[0], "", "x" * 40), (LONG[1], "7", "")])

    found = shown(part, 60)

    assert found.count("size: ") == 1 and found.count("note: ") == 1


def test_a_list_can_not_steer_the_terminal_and_reads_no_markup():
    part = FittedTable(("name", "note"), [("\x1b[2Jalice", "[bold]x[/bold]" + "y" * 60)], title="\x1b[31mred")

    found = shown(part, 60)

    assert "\x1b" not in found and "[bold]" in found and "?[2Jalice" in found


@pytest.mark.parametrize("width", WIDTHS)
def test_parties_keep_their_full_names_on_every_terminal(width):
    rows = [
        PartyRow(
            name=name, state="serving", serves=(1, 2), shadows=(3,), since_step=2, steps=40, audits={"messages": 4},
            bytes_from=1536, bytes_to=3 << 20, heard=NOW - 5,
        )
        for name in LONG
    ]  # fmt: skip

    lines = shown(parties_table(rows, NOW), width).splitlines()

    # no figure is torn from its unit or its meaning
    for part in (
        "serving 1 2, shadowing 3",
        "40 steps",
        "4 audited",
        "1.5 KiB from it",
        "3.0 MiB to it",
        "heard 5 s ago",
    ):
        assert width == 120 or sum(part in line for line in lines) == len(LONG), part
    assert all(any(name in line for line in lines) for name in LONG)
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)


def test_two_parties_whose_names_begin_alike_are_told_apart_even_where_names_are_longest():
    names = ["n" * 62 + end for end in "ab"]
    found = shown(parties_table([PartyRow(name=name, state="waiting") for name in names], NOW), 80)

    assert all(name in found for name in names)
