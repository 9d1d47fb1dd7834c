"""Texts that a peer chose, on their way to a terminal or a page: nothing in them steers what shows them."""

import io

import pytest
from rich.console import Console

from phalanx.cli.console import print_error, print_figures
from phalanx.config import is_plain, printable_text
from phalanx.report.svg import escape_text
from phalanx.telemetry import ProgressDisplay
from phalanx.train.records.record import describe_event

STEERING = [
    "\x1b[2J\x1b[1;1Hall is well",
    "\x1b]0;owned\x07",
    "\x1b]8;;http://a.example\x1b\\click\x1b]8;;\x1b\\",
    "\x9b31mred",
    "exe\u202egnp.",
    "a\u2066b\u2069c",
    "zero\u200bwidth",
    "line\u2028break\u2029",
    "bell\x07back\x08\x7f",
    "tag\U000e0041",
]
LOOKS_FINE = "stage 1: worker-1 sent \u00e9\u00e8 \u4e2d\u6587 \u20ac"


def harmless(text):
    return all(is_plain(character) or character == "\n" for character in text)


@pytest.mark.parametrize("text", STEERING)
def test_no_text_of_a_peer_steers_a_terminal(text, capsys):
    out = io.StringIO()
    with ProgressDisplay(10, 0, console=Console(file=out, width=200)) as progress:
        progress.print_message(text, "alarm")
    said = describe_event("verdict", {"party": "worker-1", "reason": text})
    print_error(f"worker-1: {text}")
    print_figures({"reason": text})

    assert said is not None
    printed = capsys.readouterr()
    for shown in (
        out.getvalue(),
        said[1],
        printed.out,
        printed.err.replace("\x1b[31m\x1b[1m", "").replace("\x1b[0m", ""),
    ):
        assert harmless(shown)
        assert "\u202e" not in shown


@pytest.mark.parametrize("text", STEERING)
def test_nor_a_page(text):
    assert all(is_plain(character) for character in escape_text(text).replace("\ufffd", "?"))


def test_ordinary_text_is_left_as_it_is():
    assert printable_text(LOOKS_FINE) == escape_text(LOOKS_FINE) == LOOKS_FINE


def test_long_text_is_cut():
    assert printable_text("x" * 10**6) == "x" * 500


def test_several_parties_are_named_as_words():
    said = describe_event("awaiting", {"address": "127.0.0.1:7070", "parties": ["alice", "bob"]})

    assert said == ("note", "listening on 127.0.0.1:7070; waiting for alice, bob")
