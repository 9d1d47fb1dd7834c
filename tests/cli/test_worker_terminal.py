"""What a worker says stands above its live table, on a narrow terminal too; nothing of a table is left behind."""

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace

import pytest

import phalanx.pipeline
from phalanx.child import PARENT
from phalanx.cli.worker import serve_once

CODES = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(.)", re.DOTALL)


LENGTHS = (10, 59, 60, 61, 79, 80, 81, 150)
WORKER = f"""
import types
import phalanx.pipeline
from phalanx.cli.worker import serve_once
from phalanx.telemetry import parties

shown, show = [], parties.live_parties

def live_parties(*given):
    shown.append(show(*given))
    return shown[-1]

def run_worker(config, worker_console):
    # the table is drawn before and after each remark, as its thread does once a second
    shown[-1].refresh()
    for length in {LENGTHS}:
        worker_console._print_text(f"{{length}} ".ljust(length, "z"))
        shown[-1].refresh()

parties.live_parties = live_parties

phalanx.pipeline.run_worker = run_worker
serve_once(types.SimpleNamespace(parallel=types.SimpleNamespace(num_ranks=1)), None)
"""


def on_a_terminal(code, width):
    """What a program writes to a terminal of its own, of so many columns."""
    inside, outside = os.openpty()
    fcntl.ioctl(outside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in (PARENT, "COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", code], stdin=outside, stdout=outside, env=environment)
    os.close(outside)
    found = b""
    with contextlib.suppress(OSError):
        # the end of a terminal is an error
        while data := os.read(inside, 1 << 16):
            found += data
    os.close(inside)
    assert child.wait() == 0
    return found.decode()


def shown(text, width):
    """The lines of a terminal after a text with cursor movements; longer lines are wrapped as terminals do."""
    rows, at, column = [""], 0, 0
    for code, command, character in CODES.findall(text):
        if command == "A":
            at = max(0, at - int(code or 1))
        elif command == "K":
            rows[at] = ""
        elif character == "\r":
            column = 0
        elif character == "\n":
            at, column = at + 1, 0
        elif character:
            at, column = (at + 1, 0) if column == width else (at, column)
            rows += [""] * (at + 1 - len(rows))
            rows[at] = rows[at].ljust(column)[:column] + character + rows[at][column + 1 :]
            column += 1
        rows += [""] * (at + 1 - len(rows))
    return [row.rstrip() for row in rows]


@pytest.mark.parametrize(
    ("width", "drawn"), [(80, "since"), (60, "this worker  waiting")], ids=["a table", "a line a party"]
)
def test_remarks_of_any_length_stand_above_the_parties_and_leave_nothing_of_them_behind(width, drawn):
    text = on_a_terminal(WORKER, width)

    rows = shown(text, width)
    assert drawn in text
    assert not [row for row in rows if drawn in row]
    said = "".join(rows)
    assert [f"{length} ".ljust(length, "z") in said for length in LENGTHS] == [True] * len(LENGTHS)


def test_a_worker_without_a_reader_says_nothing(monkeypatch):
    told = []
    monkeypatch.setenv(PARENT, "1")
    # put there without looking at what is there, which would import torch
    monkeypatch.setitem(
        vars(phalanx.pipeline), "run_worker", lambda config, worker_console: told.append(worker_console._print_line)
    )

    serve_once(SimpleNamespace(parallel=SimpleNamespace(num_ranks=1)), None)

    assert told == [None]
