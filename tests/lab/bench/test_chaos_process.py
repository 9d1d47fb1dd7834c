"""What a bench starts ends with it, however the bench ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from phalanx.lab.bench.chaos.run_process import _LEASH

PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), "patient"], process_group=0)
print(child.pid, flush=True)
time.sleep(3600)
"""
PATIENCE_S = 30.0


@pytest.fixture
def patient(tmp_path):
    """A module that would run for ever, and the environment in which it is found."""
    (tmp_path / "patient.py").write_text("import time\ntime.sleep(3600)\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_on_a_leash_ends_when_its_parent_is_killed(patient):
    command = [sys.executable, "-c", PARENT, _LEASH]
    with subprocess.Popen(command, env=patient, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        deadline = time.monotonic() + PATIENCE_S
        while b"patient" not in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[2:3]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert runs(child)
        parent.send_signal(signal.SIGKILL)

    while runs(child):
        assert time.monotonic() < deadline + PATIENCE_S
        time.sleep(0.01)


def test_a_process_whose_parent_has_ended_already_does_not_begin(patient):
    found = subprocess.run([sys.executable, "-c", _LEASH, "1", "patient"], env=patient, timeout=PATIENCE_S, check=False)

    assert found.returncode == 0
