"""Run directories that somebody else made: nothing in them stops a reader, steers a terminal or shows another file.

The attacker writes every byte of the directory, and wants to end or blind the watcher, to have a file of the reader's
machine shown, or to have a command run by whoever copies it from a card.
"""

import asyncio
import contextlib
import json
import os
import shlex

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from phalanx.cli import run_command
from phalanx.report.read import read_run
from phalanx.telemetry.run_files import open_run_file, parse_row
from phalanx.watch.config import RunWatchConfig
from phalanx.watch.growing_files import GrowingRows
from phalanx.watch.page import Snapshots
from phalanx.watch.post_mortem import make_card
from phalanx.watch.server import RunWatch, look_once
from phalanx.watch.training_metrics import RunCollector
from watched_run import append_rows, event_row, metric_row, write_run

DEEP = json.loads("[" * 900 + "]" * 900)
NASTY = [float("nan"), float("inf"), 10**400, "\ud800", "\x1b[2J\u202e", [], {"\x1b": float("nan")}, DEEP, None, True]
NAMES = ("nan", "infinity", "huge", "surrogate", "controls", "list", "object", "deep", "null", "true")
FIGURES = (
    "step",
    "time",
    "loss",
    "epsilon",
    "bytes",
    "bytes_claimed",
    "phases",
    "party_phases",
    "non_finite",
    "wall_s",
)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", num_steps=4)


def look(run):
    """Look as the page and the card do; what they show is JSON and text that can be sent."""
    state = look_once([run], RunWatchConfig())

    async def publish():
        Snapshots(lambda: False).publish_state(state)

    asyncio.run(publish())
    with contextlib.closing(RunWatch([run], RunWatchConfig(), 0.0)) as watch:
        watch.look_at_runs(lambda *_: None, 1e9)
        registry = CollectorRegistry()
        registry.register(RunCollector(watch.runs, watch.lock))
        assert b"phalanx_step" in generate_latest(registry)
    card = make_card(run)
    json.dumps(card.to_json(), allow_nan=False)
    shown = card.describe() + card.to_markdown()
    assert all(character.isprintable() or character == "\n" for character in shown)
    return state, card


@pytest.mark.parametrize("value", NASTY, ids=NAMES)
def test_no_value_of_a_figure_or_an_event_ends_a_watcher(run, value):
    # the newest line is read most
    append_rows(run / "metrics.jsonl", [{**metric_row(4), name: value} for name in FIGURES])
    append_rows(run / "metrics.jsonl", [{**metric_row(5), **dict.fromkeys(FIGURES[1:], value)}])
    bodies = [{"party": value, "reason": value, "step": value, "cause": value, "stage": value}]
    append_rows(run / "events.jsonl", [event_row(kind, b) for kind in ("verdict", "lost", "replaced") for b in bodies])
    (run / "peers.json").write_text(json.dumps(value))
    (run / "summary.json").write_text(json.dumps({"status": value, "steps_lost": value, "failure": {"errno": value}}))

    state, _ = look(run)

    assert state["runs"][0]["num_rows"] >= 4
    record = read_run(run)
    assert all(-1e18 < row["step"] < 1e18 for row in record.metrics)


@pytest.mark.parametrize(
    "text",
    [b'{"a": 1e999, "b": -Infinity, "c": NaN}', b'{"a": 99999999999999999999, "b": -1e400, "c": 1e9999}'],
)
def test_a_number_that_json_has_no_word_for_is_none(text):
    assert parse_row(text) == {"a": None, "b": None, "c": None}


def test_half_a_pair_is_a_question_mark_and_a_whole_one_a_character():
    assert parse_row(b'{"a": "\\ud800x", "b": "\\ud83d\\ude00"}') == {"a": "?x", "b": "\U0001f600"}
    assert parse_row(json.dumps({"a": DEEP}).encode()) is None
    assert parse_row(b"\xff{}") is None


@pytest.mark.parametrize("name", ["events.jsonl", "summary.json", "config.toml", "owner.pem", "workers/worker-1.log"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "terminal"])
def test_what_is_no_file_is_neither_shown_nor_waited_for(run, tmp_path, name, kind):
    secret = tmp_path / "secret.toml"
    secret.write_text('{"loss": 1, "step": 5, "status": "SECRET"}\nkey = "SECRET"\n')
    place = run / name
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    {
        "link": lambda: place.symlink_to(secret),
        "pipe": lambda: os.mkfifo(place),
        "directory": place.mkdir,
        "terminal": lambda: place.symlink_to("/dev/ptmx"),
    }[kind]()

    state, card = look(run)

    assert "SECRET" not in json.dumps(state) + card.describe()
    assert "SECRET" not in repr(read_run(run))
    with pytest.raises(OSError, match=r"regular|directory|symbolic|Too many"):
        open_run_file(place)


def test_a_folder_of_logs_that_is_a_link_shows_nothing(run, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mail.log").write_text("SECRET\n")
    if (run / "workers").exists():
        (run / "workers").rename(tmp_path / "before")
    (run / "workers").symlink_to(tmp_path / "elsewhere")

    assert look(run)[0]["runs"][0]["logs"] == {}


def test_the_end_of_a_line_that_is_too_long_is_no_line(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.watch.growing_files._MAX_LINE_BYTES", 100)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"x": "' + b"y" * 300 + b'{"step": 7}\n{"step": 8}\n')
    rows = GrowingRows(path)

    taken = [row for _ in range(12) for row in rows.read_new(40)[0]]

    assert taken == [{"step": 8}]
    assert rows.num_bad == 1


@pytest.mark.parametrize("name", ["x; touch owned", "$(touch owned)", "`id`", "a' b"])
def test_the_next_command_of_a_card_runs_nothing_of_a_party(run, name):
    append_rows(run / "events.jsonl", [event_row("verdict", {"party": name, "step": 3, "reason": "x"})])

    card = look(run)[1]

    assert card.party == name
    words = shlex.split(card.next_command.split("peers ")[-1])
    assert words == [str(run), "--revoke", name, "--reason", "convicted"]


@pytest.mark.parametrize("name", ["\x1b[2Jrun", "a\nb", "\u202eevil"])
def test_a_list_of_runs_is_not_steered_by_a_name(run, tmp_path, name, capsys):
    run.rename(tmp_path / name)

    assert run_command(["runs", str(tmp_path)]) == 0

    assert all(character.isprintable() or character == "\n" for character in capsys.readouterr().out)
