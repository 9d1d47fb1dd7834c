"""A worker process with an ordinary certificate floods the owner: it is given up, and neither disk nor run suffers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_runs import Process, events, free_port, make_keys

from phalanx.pipeline.assignment.budget import LINE_BYTES, LINES_AT_FIRST

JUNK_WORKER = str(Path(__file__).with_name("junk_worker.py"))


def start_junk(place, file, kind):
    output = place.path / "junk.txt"
    with output.open("wb") as stream:
        popen = subprocess.Popen(
            [sys.executable, JUNK_WORKER, file, kind],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            process_group=0,
            env=dict(os.environ),
        )
    place.processes.append(Process(popen, output))
    return place.processes[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "fault",
        pytest.param("ready", marks=pytest.mark.slow),
        pytest.param("applied", marks=pytest.mark.slow),
        pytest.param("garbage", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_sends_junk_is_given_up_and_the_run_ends_as_without_it(place, clean, kind):
    keys, port = make_keys(place, "owner", "north", "south"), free_port()
    files = {}
    for name in ("north", "south"):
        files[name] = place.path / f"{name}.toml"
        files[name].write_text(f"identity = '{keys / name}'\nowner = '127.0.0.1:{port}'\n")
    junk, south = start_junk(place, str(files["north"]), kind), place.start("worker", str(files["south"]))
    owner = place.train(
        "pipeline.remote_workers=['north','south']",
        f"pipeline.pki='{keys}'",
        f"pipeline.transport.port={port}",
    )

    assert owner.wait() == 0, owner.text + junk.text
    assert south.wait() == 0, south.text
    summary = place.summary()
    assert (summary["lost"], summary["evicted"]) == (["north"], [])
    assert summary["final_weights_digest"] == clean["final_weights_digest"]
    # what the owner writes about the run itself has the certificates in it, and no word of a worker
    lines = [line for line in (place.path / "run" / "events.jsonl").read_bytes().splitlines() if b"BEGIN" not in line]
    assert max(len(line) for line in lines) < LINE_BYTES
    assert len(events(place, "refused", "fault")) < 4 * (LINES_AT_FIRST + 16)
    assert "\x1b]0;owned" not in owner.text
