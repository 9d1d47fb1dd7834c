"""How long is it from two volunteers' tokens to the first step that they have done together?

``python -m phalanx.lab.bench.alone.first_step OUT.json [--rounds 3]``

The way of `docs/tutorials/three_machines.md`, on one machine: an owner that has run `phalanx init` and
`phalanx invite`, and two volunteers that each run one line, `phalanx join TOKEN`. The clock starts as the tokens are
used; it is read when both hold their certificates, whereupon the owner runs `phalanx train`, and at the end of the
first step. Seconds of wall time. What is installed, and the wait for people to type, are not in it.
"""

import json
import pydoc
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.harness import print_progress, run_program

PHALANX = str(Path(sys.executable).with_name("phalanx"))
NAMES = ("alice", "bob")
LIMIT_S = 600.0


def measure(rounds: int = 3) -> dict[str, Any]:
    """Measure some rounds."""
    rows = []
    for number in range(rounds):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as started:
            rows.append(measure_round(Path(folder), started))
        print_progress(f"round {number + 1} of {rounds}: {rows[-1]['first_step_s']:.1f} s")
    return {"rows": rows, "median_s": statistics.median(row["first_step_s"] for row in rows)}


def measure_round(home: Path, started: ExitStack) -> dict[str, float]:
    """One owner, two volunteers, one first step."""
    prepare(home)
    owner = start(started, home, "invite", "shared.toml", "--name", "alice", "--name", "bob", "--host", "127.0.0.1")
    output = home / "invite.txt"
    wait_for(lambda: "waiting for all to join" in output.read_text(encoding="utf-8"), owner)
    tokens = re.findall(r"phalanx join (\S+)", output.read_text(encoding="utf-8"))
    begin = time.time()
    for name, token in zip(NAMES, tokens, strict=True):
        (home / name).mkdir()
        start(started, home / name, "join", token, "--port", "0")
    wait_for(lambda: owner.poll() == 0, owner)
    certified = time.time()
    trained = start(started, home, "train", "shared.toml")
    metrics = home / "runs" / "shared" / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and "\n" in metrics.read_text(encoding="utf-8"), trained)
    first = json.loads(metrics.read_text(encoding="utf-8").splitlines()[0])
    return {"certified_s": certified - begin, "first_step_s": first["time"] - begin}


def prepare(home: Path) -> None:
    """Lay the tutorial's text and run file, with a port that is free here."""
    (home / "texts").mkdir()
    for module in ("argparse", "json", "logging", "re"):
        (home / "texts" / f"{module}.txt").write_text(
            pydoc.plain(pydoc.TextDoc().document(import_module(module))), encoding="utf-8"
        )
    arguments = ["shared.toml", "--kind", "remote", "--data", "texts", "--workers", ",".join(NAMES)]
    subprocess.run([PHALANX, "init", *arguments], cwd=home, check=True, capture_output=True)  # noqa: S603 - our own command
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    run_file = home / "shared.toml"
    run_file.write_text(run_file.read_text(encoding="utf-8").replace("7070", str(port)), encoding="utf-8")


def start(started: ExitStack, home: Path, *command: str) -> subprocess.Popen[bytes]:
    """Start a command in a directory; it ends with the round."""
    log = started.enter_context((home / f"{command[0]}.txt").open("wb"))
    process = subprocess.Popen([PHALANX, *command], cwd=home, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603 - our own command
    started.callback(process.wait, LIMIT_S)
    started.callback(process.terminate)
    return process


def wait_for(has_come: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Look ten times a second until something is so."""
    until = time.monotonic() + LIMIT_S
    while not has_come():
        if process.poll() not in (None, 0) or time.monotonic() > until:
            raise RuntimeError(f"{process.args!r}: did not get there; its exit code is {process.poll()}")
        time.sleep(0.1)


if __name__ == "__main__":
    run_program("first-step", measure)
