"""What users get wrong most often ends in one message with its place and what to do, and in its exit code."""

import contextlib
import json
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
from phalanx.cli import run_command
from phalanx.cli.answers.ending import error_object
from phalanx.cli.explain import error_pages
from phalanx.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
SOURCE = Path(phalanx.__file__).resolve().parents[1]
ASKED_ABOUT_TORCH = """
import json, os, sys
from phalanx.cli import run_command
from phalanx.cli.answers.ending import error_object
from phalanx.cli.explain import error_pages
from phalanx.errors import ConfigError

answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
os.dup2(1, 2)
# what every command imports is imported once
run_command(["train", "absent.toml"])
for line in sys.stdin:
    directory, words = json.loads(line)
    child = os.fork()
    if child == 0:
        os.chdir(directory)
        os.environ["PHALANX_CACHE"] = os.path.join(directory, "cache")
        code = run_command(words)
        os.write(answers, json.dumps([code, "torch" in sys.modules]).encode() + b"\\n")
        os._exit(0)
    os.waitpid(child, 0)
"""


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
        code = run_command(mistake.command.split())

    said = capfd.readouterr().err
    assert code == mistake.code, said
    for words in mistake.words:
        assert words in said
    assert "Traceback" not in said
    assert said.startswith(("error: ", "Usage: "))
    assert re.search(r"\[PHX-[A-Z]\d{3}\]\n$", said)


@pytest.fixture(scope="module")
def answers_about_torch():
    """Asks a process that has read a run file before, in a child of its own, whether a command imports torch."""
    program = [sys.executable, "-c", ASKED_ABOUT_TORCH]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def ask(directory, words):
            process.stdin.write(json.dumps([str(directory), words]) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_found_before_torch_is_imported(mistake, home, answers_about_torch):
    skip_with_a_gpu(mistake)

    with contextlib.closing(mistake.lay(home) or socket.socket()):
        code, has_torch = answers_about_torch(home, mistake.command.split())

    assert (code, has_torch) == (mistake.code, False)


def test_a_mistake_leaves_no_run_directory_that_the_next_start_would_trip_over(home, capfd):
    refused = [one for one in MISTAKES if one.command == "train run.toml"]
    assert len(refused) > 20
    for mistake in refused:
        mistake.lay(home)
        run_command(mistake.command.split())
    said = capfd.readouterr().err

    assert "already has a run" not in said


def test_the_page_of_mistakes_has_each_of_them_with_its_exit_code():
    rows = [
        line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `phalanx")
    ]
    listed = {row[1]: int(row[3]) for row in rows}

    assert listed == {mistake.name: mistake.code for mistake in MISTAKES}
    assert len(MISTAKES) >= 60


RESULT = json.loads((PAGE.parents[1] / "benchmarks" / "results" / "mistakes-cpu-2cores-busy.json").read_text())
CURES = (
    r"give|need|choose|set |lower|raise|expected|choices|should be|remove|make|correct |convert|add |leave|take|fetch "
    r"|save|free "
    r"|end what|copy|change|have a new|let that|Did you mean|Missing argument|install|issues it"
    r"|only the|start it|fetched"
)


def test_every_mistake_was_made_in_a_process_of_its_own_and_cost_less_than_two_seconds():
    rows = {row["mistake"]: row for row in RESULT["rows"]}

    assert rows.keys() == {mistake.name for mistake in MISTAKES}
    assert {name: row["exit"] for name, row in rows.items()} == {mistake.name: mistake.code for mistake in MISTAKES}
    assert max(row["cpu_s"] for row in rows.values()) < 2


@pytest.mark.parametrize("row", RESULT["rows"], ids=lambda row: row["mistake"])
def test_what_was_told_names_its_place_and_a_cure(row):
    mistake = next(one for one in MISTAKES if one.name == row["mistake"])
    words = {*mistake.command.split(), *mistake.files} - {"train", "report", "audit", "verify"}
    keys = {"train.", "data.", "pipeline.", "model.", "optimizer.", "device", "RUN.toml", "token", "127.0.0.1"}

    assert any(place in row["message"] for place in {*words, *keys, "alice/certificate.pem"}), row["message"]
    assert re.search(CURES, row["message"]), row["message"]


def test_every_refusal_of_a_run_names_a_file_or_a_directory():
    rows = [row for row in RESULT["rows"] if row["command"].startswith("phalanx train run.toml")]
    named = r"run\.toml|text|tok\.json|model/\S+|acme/tiny|old|new"
    files = re.compile(rf"error: (--set|--unset|\S*({named})\b)|: (text|tok\.json|acme/tiny)")

    assert len(rows) > 40
    assert [row["message"] for row in rows if not files.search(row["message"])] == []


def test_the_page_says_what_the_result_has():
    text = PAGE.read_text(encoding="utf-8")
    times = sorted(row["cpu_s"] for row in RESULT["rows"])

    assert f"All {len(MISTAKES)} are found before torch is imported" in text
    assert f"{times[len(times) // 2]:.2f} s of CPU time in the middle and {times[-1]:.2f} s at most" in text
    for row in RESULT["rows"]:
        assert f"| `{row['command']}` | {row['mistake']} | " in text


HAVE_NO_FILE = {
    "a token that was not copied whole",
    "a command without its argument",
    "a verb that is none",
    "a plan of nothing",
    "a plan for an unknown cluster",
}
ARE_THE_FILE = {
    "no run file",
    "TOML syntax",
    "no worker file",
    "a worker without keys",
    "a certificate of another authority",
    "an expired certificate",
    "a full disk",
    "an adapter in the place of a model",
}
"""What is wrong is the file itself, and no key of it."""
ARE_WORDS_OF_THE_SHELL = {"a command without its argument", "a verb that is none"}
"""Refused by the parser of command lines, whose message is all that it tells."""


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_programs_get_every_fact_of_a_mistake(mistake, home, capfd):
    skip_with_a_gpu(mistake)
    with contextlib.closing(mistake.lay(home) or socket.socket()):
        run_command([*mistake.command.split(), "--json"])

    error = json.loads(capfd.readouterr().out.splitlines()[-1])["error"]
    missing = {name for name in ("file", "key", "found", "expected", "do") if not error[name]}
    allowed = {"file"} if mistake.name in HAVE_NO_FILE else set()
    allowed |= {"key"} if mistake.name in ARE_THE_FILE else set()
    allowed |= {"found", "expected"} if mistake.name in ARE_WORDS_OF_THE_SHELL else set()
    assert missing <= allowed, error


def test_a_cure_that_no_place_gives_is_that_of_the_page_of_the_code():
    error = error_object(ConfigError("run.toml: nothing more is known"))["error"]

    assert error["do"] == error_pages()["PHX-C001"].cure
    assert error_object(ConfigError("x").with_facts(do="lower it"))["error"]["do"] == "lower it"
