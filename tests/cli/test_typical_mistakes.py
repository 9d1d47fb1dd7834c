"""What users get wrong most often ends in one message with its place and what to do, and in its exit code."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mistakes import MISTAKES

import phalanx
from phalanx.cli import run

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
SOURCE = Path(phalanx.__file__).resolve().parents[1]
NEED_TORCH = {"a vocabulary too large for the text"}
"""Mistakes that only a trained tokenizer can show."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    return tmp_path


def skip_with_a_gpu(mistake):
    if "GPU" in mistake.name and torch.cuda.is_available():
        pytest.skip("this machine has the GPU")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_said_with_its_place_and_what_to_do(mistake, home, capfd):
    skip_with_a_gpu(mistake)
    with contextlib.closing(mistake.lay(home) or socket.socket()):
        code = run(mistake.command.split())

    said = capfd.readouterr().err
    assert code == mistake.code, said
    for words in mistake.words:
        assert words in said
    assert "Traceback" not in said
    assert said.startswith(("error: ", "Usage: "))
    assert re.search(r"\[PHX-[A-Z]\d{3}\]\n$", said)


@pytest.mark.parametrize(
    "mistake", [one for one in MISTAKES if one.name not in NEED_TORCH], ids=lambda mistake: mistake.name
)
def test_a_mistake_is_found_before_torch_is_imported(mistake, home):
    skip_with_a_gpu(mistake)
    code = """
import sys
from phalanx.cli import run
run(sys.argv[1:])
sys.exit("torch" in sys.modules)
"""

    with contextlib.closing(mistake.lay(home) or socket.socket()):
        result = subprocess.run(
            [sys.executable, "-c", code, *mistake.command.split()],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            timeout=120,
            check=False,
        )

    assert result.returncode == 0, result.stderr


def test_a_mistake_leaves_no_run_directory_that_the_next_start_would_trip_over(home, capfd):
    refused = [one for one in MISTAKES if one.command == "train run.toml"]
    assert len(refused) > 20
    for mistake in refused:
        mistake.lay(home)
        run(mistake.command.split())
    said = capfd.readouterr().err

    assert "holds a run already" not in said


def test_the_page_of_mistakes_has_each_of_them_with_its_exit_code():
    rows = [
        line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `phalanx")
    ]
    listed = {row[1]: int(row[3]) for row in rows}

    assert listed == {mistake.name: mistake.code for mistake in MISTAKES}
    assert len(MISTAKES) >= 60
