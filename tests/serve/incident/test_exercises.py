"""Playbooks against real server processes, and a rollback to the last checkpoint of a run whose audits hold."""

import json
import os
import shutil
import subprocess
import sys

import httpx2
import pytest

from phalanx.errors import AuditLogError, CheckpointError, ConfigError
from phalanx.serve.incident import Playbook, exercise_playbook, find_certified, read_playbook
from phalanx.serve.incident.playbook import list_playbooks
from tiny_run_file import tiny_run_file
from tiny_served import add_key, write_model

# three programs start one behind the other, each of which imports torch
pytestmark = pytest.mark.timeout(1200)
ASK = {"model": "run", "prompt": "the", "max_tokens": 3}


def run_phalanx(*arguments, **more):
    command = [sys.executable, "-m", "phalanx", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with checkpoints of steps 2, 4 and 6, whose two workers are guarded."""
    home = tmp_path_factory.mktemp("trained")
    sections = "[pipeline]\nstages = 3\n\n[guard]\naudit_rate = 1.0\n\n[checkpoint]\nevery = 2\nkeep = 9\n"
    (home / "run.toml").write_text(tiny_run_file(sections))
    result = run_phalanx("train", home / "run.toml", "--run-dir", home / "run", cwd=home, env=dict(os.environ))
    assert result.returncode == 0, result.stderr[-2000:]
    return home / "run"


def test_every_playbook_is_whole():
    assert list_playbooks() == ["bad_model", "extraction", "leaked_key"]
    for name in list_playbooks():
        playbook = read_playbook(name)
        verbs = [step.do for step in playbook.steps]
        assert verbs[0] == "open_incident"
        assert "write_report" in verbs
        assert verbs.index("open_stream") < verbs.index("expect_stream_ends")
        for step in playbook.steps:
            assert step.say.endswith("."), step.say


def test_a_playbook_of_ones_own_is_strict(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('title = "mine"\nsigns = ["a"]\n[[steps]]\nsay = "Do what must be done."\ndo = "run_shell"\n')

    with pytest.raises(ConfigError):
        read_playbook(str(file))
    for name in ("none", "../leaked_key", "/etc/passwd"):
        with pytest.raises(ConfigError):
            read_playbook(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaked_key", "extraction"])
def test_an_exercise_does_every_step_to_a_real_server(name, tmp_path):
    directory = write_model(tmp_path / "cache")

    results = list(exercise_playbook(read_playbook(name), directory))

    assert {result.outcome for result in results if result.do} == {"worked"}, results
    assert {result.outcome for result in results if not result.do} <= {"for people"}


@pytest.mark.slow
def test_an_exercise_says_what_did_not_work(tmp_path):
    directory = write_model(tmp_path / "cache")
    steps = [
        {"say": "It is refused at once.", "do": "expect_key_refused"},
        {"say": "Back to a checkpoint.", "do": "roll_back"},
    ]
    playbook = Playbook.model_validate_json(json.dumps({"title": "wrong", "signs": ["none"], "steps": steps}))

    refused, rollback = exercise_playbook(playbook, directory)

    assert (refused.outcome, refused.detail) == ("failed", "StepFailedError: status 200, expected 401")
    assert rollback.outcome == "not exercised"


@pytest.mark.slow
def test_a_bad_model_goes_back_to_its_certified_checkpoint(trained):
    result = run_phalanx("incident", "exercise", "bad_model", trained, "--json")

    answer = json.loads(result.stdout.splitlines()[-1])
    assert result.returncode == 0, answer
    assert answer["failed"] == []
    assert {row["outcome"] for row in answer["steps"] if row["do"]} == {"worked"}


@pytest.mark.slow
def test_a_running_server_opens_the_checkpoint_and_so_does_the_next_one(trained, tmp_path):
    access = tmp_path / "access"
    _, secret = add_key(access)
    headers = {"authorization": f"Bearer {secret}"}
    serve = [
        sys.executable,
        "-m",
        "phalanx",
        "serve",
        trained,
        "--access",
        access,
        "--name",
        "run",
        "--port",
        "0",
        "--json",
    ]
    command = [*map(str, serve), "--name", "run", "--port", "0", "--json"]
    digests = []
    for turn in range(2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            ready = json.loads(process.stdout.readline())
            digests.append(ready["models"]["run"])
            with httpx2.Client(base_url=ready["url"], headers=headers, trust_env=False, timeout=250) as http:
                assert http.post("/v1/completions", json=ASK).status_code == 200
                if turn == 0:
                    result = run_phalanx(
                        "incident", "rollback", trained, "--model", "run", "--before", 6, "--access", access, "--json"
                    )
                    answer = json.loads(result.stdout.splitlines()[-1])
                    assert answer["step"] == 4
                    # until the files are there the model is out of service, and never answers from the old ones
                    digest, statuses = digests[0], set()
                    for _ in range(100_000):
                        statuses.add(http.post("/v1/completions", json=ASK).status_code)
                        shown = http.get("/v1/models/run")
                        if shown.status_code == 200:
                            digest = shown.json()["digest"]
                            break
                    assert statuses <= {503, 200}
                    assert digest == answer["digest"] != digests[0]
                    assert http.post("/v1/completions", json=ASK).status_code == 200
        finally:
            process.terminate()
            process.communicate(timeout=120)
    assert digests[1] == digest
    log = (access / "log" / "requests-000001.jsonl").read_text()
    assert '"kind":"model_replaced"' in log


@pytest.mark.slow
def test_what_is_certified(trained, tmp_path):
    assert find_certified(trained).step == 6
    assert find_certified(trained, before=4).step == 2
    with pytest.raises(CheckpointError, match="not before step 1"):
        find_certified(trained, before=1)

    damaged = tmp_path / "run"
    shutil.copytree(trained, damaged)
    newest = max((damaged / "checkpoints").glob("step-*"))
    shard = next(path for path in sorted(newest.iterdir()) if path.suffix == ".safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    certified = find_certified(damaged)
    assert certified.step == 4
    assert "step 6" in certified.skipped[0]

    log = damaged / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(AuditLogError):
        find_certified(damaged)


def test_the_commands_say_what_is_missing(tmp_path):
    keys = tmp_path / "access"
    add_key(keys)
    for arguments, word in (
        (["quarantine", "--access", keys], "one of --key and --model"),
        (["report", "--access", keys], "no open incident"),
        (["quarantine", "--key", "a" * 12, "--access", keys], "holds no key"),
    ):
        result = run_phalanx("incident", *arguments)
        assert result.returncode != 0
        assert word in result.stderr, result.stderr
