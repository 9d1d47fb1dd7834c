"""A shell completes commands, options and codes; that costs a start nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx

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


def test_help_imports_no_detector_of_shells():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "phalanx", "--help"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert "--install-completion" in result.stdout
    assert "shellingham" not in result.stderr
