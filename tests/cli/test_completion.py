"""A shell completes commands and options, and is not kept waiting for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.cli import run_command

SOURCE = Path(phalanx.__file__).resolve().parents[1]


def completed(words: str) -> set[str]:
    """What bash is offered after these words."""
    asked = {"_PHALANX_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    result = subprocess.run(
        [sys.executable, "-m", "phalanx"],
        env={**os.environ, **asked, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stderr == ""
    return set(result.stdout.split())


@pytest.mark.parametrize(
    ("words", "offered"),
    [("phalanx tr", "train"), ("phalanx model in", "inspect"), ("phalanx doctor --js", "--json")],
)
def test_bash_is_offered_what_may_follow(words, offered):
    assert offered in completed(words)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_can_be_printed(shell):
    result = subprocess.run(
        [sys.executable, "-m", "phalanx"],
        env={**os.environ, "_PHALANX_COMPLETE": f"source_{shell}", "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.returncode == 0
    assert "_PHALANX_COMPLETE" in result.stdout


def test_completing_loads_nothing_heavy():
    asked = {"_PHALANX_COMPLETE": "complete_bash", "COMP_WORDS": "phalanx tr", "COMP_CWORD": "1"}
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "phalanx"],
        env={**os.environ, **asked, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert result.stdout.split() == ["train"]
    assert "phalanx.cli.app" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "grpc", "numpy", "cryptography"})


def test_the_help_says_how_to_switch_it_on(capsys):
    run_command(["--help"])

    assert "--install-completion" in capsys.readouterr().out
