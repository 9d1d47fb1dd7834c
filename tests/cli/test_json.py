"""Every command can be asked for JSON: one object, or lines of them, alone on stdout; an error is one as well."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.cli import run_command
from phalanx.cli.answers.answer import Answer
from phalanx.cli.answers.tree import leaf_commands, returns_answer
from phalanx.cli.outcome import build_command
from phalanx.errors import FACTS
from tiny_run_file import tiny_run_file

SOURCE = Path(phalanx.__file__).resolve().parents[1]
LEAVES = dict(leaf_commands(build_command()))
WITHOUT_JSON = {
    ("enclave", "own"): "a run starts it and speaks with it over its sockets; it prints nothing",
    ("enclave", "local"): "a run starts it and speaks with it over its sockets; it prints nothing",
}
PLAN = ["--model", "gpt2", "--cluster", "a100-nodes", "--gpus", "8", "--layout", "dp=8", "--sequence-length", "512"]
CALLS = {
    "bench": ["bench", "pipelin"],
    "audit": ["audit", "verify", "."],
    "doctor": ["doctor"],
    "init": ["init", "new.toml", "--kind", "scratch"],
    "explain": ["explain", "PHX-C002"],
    "model": ["model", "inspect", "."],
    "pki init": ["pki", "init", "keys"],
    "pki issue": ["pki", "issue", "keys", "alice"],
    "pki show": ["pki", "show", "keys/alice/certificate.pem"],
    "pki request": ["pki", "request", "bob"],
    "pki sign": ["pki", "sign", "keys", "bob/request.csr"],
    "plan": ["plan", *PLAN],
    "checkpoint new-key": ["checkpoint", "new-key", "new.key"],
    "data new-key": ["data", "new-key", "data.key"],
    "report": ["report", "keys"],
    "train": ["train", "run.toml"],
    "invite": ["invite", "keys", "--name", "carol", "--no-wait"],
    "join": ["join", "phx1-nothing"],
    "worker": ["worker", "worker.toml"],
    "launch": ["launch", "run.toml", "--dry-run"],
}
"""Quick calls in a directory where they run in this order; those of the first group fail."""
FAIL = {"bench": 2, "audit": 5, "report": 3, "train": 2, "join": None, "worker": 2, "launch": 2}


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_every_command_answers_in_json_or_says_why_not():
    silent = {names for names, leaf in LEAVES.items() if not returns_answer(leaf)}

    assert silent == set(WITHOUT_JSON), (
        "a command returns what it found as phalanx.cli.answers.answer.Answer, which gives it --json; "
        "one that has nothing to answer is named, with the reason, in WITHOUT_JSON here"
    )


@pytest.mark.parametrize("names", LEAVES, ids=" ".join)
def test_no_command_has_a_json_of_its_own(names):
    asking = [one for one in LEAVES[names].params if "--json" in one.opts]

    assert len(asking) == (names not in WITHOUT_JSON), "remove the option: returning an Answer brings it"
    assert not [one.name for one in asking if one.expose_value]


def test_quick_commands_print_json_and_nothing_else(home, capfd):
    for name, words in CALLS.items():
        code = run_command([*words, "--json"])

        said = capfd.readouterr()
        found = [json.loads(line) for line in said.out.splitlines()]
        assert found, (name, said.err)
        assert all(isinstance(one, dict) for one in found), name
        assert ("error" in found[-1]) == (name in FAIL), (name, found[-1])
        if FAIL.get(name) is not None:
            assert code == FAIL[name], (name, said.err)
        elif name not in FAIL:
            assert code in (0, 3), (name, said.err)


def test_an_error_is_an_object_with_every_fact_and_the_message_of_the_terminal(home, capfd):
    (home / "run.toml").write_text(tiny_run_file().replace("seed =", "sede ="))
    run_command(["train", "run.toml"])
    told = capfd.readouterr().err

    code = run_command(["train", "run.toml", "--json"])

    (line,) = capfd.readouterr().out.splitlines()
    error = json.loads(line)["error"]
    assert set(error) == {*FACTS, "kind", "exit_code", "message"}
    assert error["exit_code"] == code == 2
    assert error["kind"] == "ConfigError"
    assert told == f"error: {error['message']} [{error['code']}]\n"


@pytest.mark.parametrize(
    "words",
    [["trian", "--json"], ["train", "--json"], ["train", "a.toml", "--no-such", "--json"], ["--json", "train"]],
    ids=" ".join,
)
def test_a_command_line_that_cannot_be_parsed_is_refused_in_json(words, capfd):
    assert run_command(words) == 2

    error = json.loads(capfd.readouterr().out)["error"]
    assert (error["code"], error["exit_code"]) == ("PHX-C002", 2)


def test_what_libraries_and_child_processes_print_is_kept_from_stdout(capfd):
    from phalanx.cli.answers.answer import json_alone
    from phalanx.cli.answers.ending import exit_code_of

    def chatty() -> Answer:
        print("a library")  # noqa: T201 - what is to be kept away
        subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
        os.write(1, b"a C library\n")
        return Answer({"loss": float("nan"), "path": Path("a"), "steps": (1, 2)}, 6)

    with json_alone():
        code = exit_code_of(chatty)

    said = capfd.readouterr()
    assert code == 6
    assert json.loads(said.out) == {"loss": None, "path": "a", "steps": [1, 2]}
    assert {"a library", "a child", "a C library"} <= set(said.err.splitlines())


def test_after_a_command_stdout_is_as_it_was(capfd):
    run_command(["trian", "--json"])
    capfd.readouterr()

    os.write(1, b"still here\n")

    assert capfd.readouterr().out == "still here\n"


def test_a_bug_is_an_object_as_well_and_its_traceback_goes_to_stderr():
    code = """
import sys, types
from phalanx.cli import main

def write_report(run_dir):
    raise RuntimeError("a bug")

sys.modules["phalanx.report"] = types.SimpleNamespace(write_report=write_report, check_run=lambda run_dir: None)
sys.argv[1:] = ["report", "runs/x", "--json"]
main()
"""

    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert result.returncode == 1
    assert json.loads(result.stdout)["error"]["exit_code"] == 1
    assert "RuntimeError: a bug" in result.stderr


def test_a_process_that_is_forked_meanwhile_answers_nothing():
    code = """
import os
from phalanx.cli.answers.answer import Answer, json_alone, print_object
from phalanx.cli.answers.ending import exit_code_of

def forking():
    worker = os.fork()
    if not worker:
        os._exit(exit_code_of(lambda: Answer({"who": "worker"}, 7)))
    return Answer({"who": "owner", "worker": os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])})

with json_alone():
    exit_code_of(forking)
"""

    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert [json.loads(line) for line in result.stdout.splitlines()] == [{"who": "owner", "worker": 7}]
