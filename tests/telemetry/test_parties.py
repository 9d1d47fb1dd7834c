"""Rows of parties: the file that is renewed, and how a terminal shows them."""

import io
import json

import pytest
from rich.console import Console

from phalanx.errors import InputError
from phalanx.telemetry import PartyRow, PeersFile, ProgressDisplay, StepReading
from phalanx.telemetry.parties import (
    PERIOD_S,
    PartiesStatus,
    live_parties,
    parties_lines,
    parties_table,
    read_peers,
    size_in_words,
)

NOW = 1_000_000


def status(*rows, step=3, written=NOW):
    return PartiesStatus(run="first", step=step, steps=10, written=written, parties=rows)


ALICE = PartyRow(
    name="alice", state="serving", serves=(1, 2), shadows=(3,), since=NOW - 61, since_step=2, steps=4,
    audits={"messages": 4, "state": 3}, bytes_from=1536, bytes_to=3 << 20, heard=NOW - 5,
)  # fmt: skip


def test_what_is_written_last_says_that_the_session_is_over_and_is_read_as_it_was(tmp_path):
    path = tmp_path / "peers.json"

    PeersFile(path, lambda: status(ALICE)).close()

    assert read_peers(path) == status(ALICE).model_copy(update={"ended": True})
    assert [entry.name for entry in tmp_path.iterdir()] == ["peers.json"]


def test_it_is_renewed_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.telemetry.parties.PERIOD_S", PERIOD_S / 1000)
    path, asked, steps = tmp_path / "peers.json", [], iter([1, 1, 1, 2])

    def read():
        asked.append(next(steps, 2))
        return status(ALICE, step=asked[-1])

    with PeersFile(path, read):
        while len(asked) < 8:
            pass
        shown = read_peers(path)

    assert shown.step == 2
    assert not shown.ended


def test_a_disk_that_refuses_stops_nothing(tmp_path):
    PeersFile(tmp_path / "nowhere" / "peers.json", lambda: status(ALICE)).close()

    assert read_peers(tmp_path / "nowhere" / "peers.json") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields | {"more": 1},
        lambda fields: fields | {"step": -1},
        lambda fields: fields | {"version": 2},
        lambda fields: fields | {"parties": [{"name": "alice", "state": "friendly"}]},
        lambda fields: fields | {"parties": [{"name": "a" * 1000, "state": "serving"}]},
        lambda fields: [],
    ],
)
def test_a_file_that_is_no_status_is_refused(tmp_path, change):
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(change(json.loads(status(ALICE).model_dump_json()))))

    with pytest.raises(InputError, match="is no status of parties"):
        read_peers(path)


def test_a_row_says_what_the_party_does():
    line = parties_lines([ALICE], NOW)[0]

    assert line == (
        "alice  serving 1 2, shadowing 3  since step 2  4 steps  4 audited  1.5 KiB from it  3.0 MiB to it"
        "  heard 5 s ago"
    )


def test_a_party_that_is_gone_is_not_shown_with_stages():
    assert parties_lines([ALICE.model_copy(update={"state": "revoked"})], NOW)[0].startswith("alice  revoked")


def test_neither_table_nor_lines_can_steer_a_terminal():
    row = PartyRow(name="\x1b[2Jalice", state="waiting")
    console = Console(width=120, force_terminal=False)
    with console.capture() as capture:
        console.print(parties_table([row, PartyRow(name="[bold]bob", state="lost")], NOW))

    assert "\x1b" not in capture.get()
    assert "?[2Jalice" in capture.get()
    assert "[bold]bob" in capture.get()
    assert "\x1b" not in parties_lines([row], NOW)[0]


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, ""), (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 30, "1.0 GiB"), (1 << 42, "4096.0 GiB")],
)
def test_sizes_are_said_in_words(size, words):
    assert size_in_words(size) == words


class Shown:
    def __init__(self, *rows):
        self.parties, self.changed, self.asked = rows, list(rows), 0

    def party_rows(self):
        self.asked += 1
        return self.parties

    def changed_rows(self):
        found, self.changed = self.changed, []
        return found


def test_on_a_terminal_the_parties_stand_above_the_bar_and_nothing_of_them_is_printed_into_the_scrollback():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system=None)

    with ProgressDisplay(10, console=console) as display:
        display.show_parties(Shown(ALICE))
        display.show_step(3, StepReading(1.0, 2.0))

    drawn = text.getvalue()
    assert "serving 1 2, shadowing 3" in drawn
    assert drawn.rindex("party") < drawn.rindex("3/10")


def test_where_there_is_no_terminal_a_party_is_told_of_when_it_changes():
    text = io.StringIO()
    shown = Shown(ALICE)
    with ProgressDisplay(10, every=1, console=Console(file=text, width=200)) as display:
        display.show_parties(shown)
        for step in (1, 2, 3):
            display.show_step(step, StepReading(1.0, 2.0))

    assert text.getvalue().count("alice  serving 1 2") == 1
    assert shown.asked == 0


def test_a_live_table_is_drawn_on_a_terminal_and_on_nothing_else():
    for is_terminal in (True, False):
        text = io.StringIO()
        console = Console(file=text, force_terminal=is_terminal, width=120)

        with live_parties(console, lambda: [ALICE]):
            console.print("a line")

        assert ("shadowing 3" in text.getvalue()) == is_terminal
        assert "a line" in text.getvalue()
