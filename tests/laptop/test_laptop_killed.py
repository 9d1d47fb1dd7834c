"""A whole laptop run in real processes: killed in every phase, it goes on, and ends with the bits of one left alone."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from made_texts import write_texts

from phalanx.cli.outcome import run_command
from phalanx.laptop.plan import PHASES
from phalanx.laptop.probe import Measured

COMMAND = [sys.executable, "-m", "phalanx", "laptop", "texts", "--minutes", "3", "--yes", "--out"]
MOMENTS = {
    "tokenizer": "phase 1 of 6",
    "pretrain": r"step 4: held_out",
    "chat": r"step 4: validation",
    "preferences": r"step 4: validation",
    "evaluate": "phase 5 of 6",
    "report": "phase 6 of 6",
}
"""The line behind which a start is killed, by phase."""
STEPS = {"steps": 8, "validate_every": 2, "every": 2}


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders with the same small plan."""
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path / "texts", num_sections=30)
    # a slow machine with one core gets the smallest shape
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0})
    monkeypatch.setattr(
        "phalanx.laptop.probe.measure_shape",
        lambda shape, *_: Measured(1e-4 * shape.hidden / 64, 5e-5 * shape.hidden / 64),
    )
    assert run_command(["laptop", "texts", "--minutes", "3", "--out", "left_alone", "--prepare"]) == 0
    for name in ("pretrain", "chat", "preferences"):
        path = tmp_path / "left_alone" / f"{name}.toml"
        text = path.read_text()
        for key, value in STEPS.items():
            text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.M)
        path.write_text(text)
    shutil.copytree(tmp_path / "left_alone", tmp_path / "killed")
    return tmp_path


def start(folder):
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*COMMAND, folder], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def kill_in(phase, folder):
    """Start the command, kill it -9 in a phase, and return the lines before."""
    process, lines, is_in_phase = start(folder), [], False
    for line in process.stdout:
        lines.append(line)
        is_in_phase = is_in_phase or f"of 6: {phase}" in line
        if is_in_phase and re.search(MOMENTS[phase], line):
            break
    process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL, "".join(lines)
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_that_is_killed_in_every_phase_ends_with_the_same_bits(folders):
    alone = start("left_alone")
    shown, _ = alone.communicate()
    assert alone.returncode == 0, shown

    stamps = {}
    for number, phase in enumerate(PHASES):
        printed = kill_in(phase, "killed")
        # the phase before this one was killed, and is done within this start
        for done in PHASES[: max(0, number - 1)]:
            # what is done is not repeated, and its results are not touched
            assert f"{done}: done before" in printed
            record = folders / "killed" / "done" / f"{done}.json"
            assert stamps.setdefault(done, record.stat().st_mtime_ns) == record.stat().st_mtime_ns
        if phase in ("chat", "preferences", "evaluate"):
            assert "an earlier start finished no step" not in printed
    last = start("killed")
    shown, _ = last.communicate()
    assert last.returncode == 0, shown

    results = [json.loads((folders / name / "results.json").read_text()) for name in ("left_alone", "killed")]
    assert results[0]["final_weights_digest"] == results[1]["final_weights_digest"]
    assert results[0]["scores"] == results[1]["scores"]
    assert results[0]["answers"] == results[1]["answers"]
    assert len(results[0]["answers"]) == 3
    # the others may have ended before the kill reached them
    trained = {"pretrain", "chat", "preferences"}
    assert trained <= {row["phase"] for row in results[1]["phases"] if row["interrupted"]}
    assert not any(row["interrupted"] for row in results[0]["phases"])
    before, after = (results[0]["scores"][0][name] for name in ("before", "after"))
    assert after < before
    for phase in ("pretrain", "chat", "preferences"):
        weights = [(folders / name / "runs" / phase / "summary.json").read_text() for name in ("left_alone", "killed")]
        first, second = (json.loads(text)["final_weights_digest"] for text in weights)
        assert first == second
