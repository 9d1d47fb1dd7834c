"""``phalanx witness`` in processes of its own, over HTTP on loopback: a quorum, a dead witness, two histories."""

import contextlib
import io
import json
import subprocess
import sys

import pytest

from phalanx.cli import run_command
from phalanx.security.audit import AuditLog
from phalanx.security.crypto import create_authority, issue_certificate, load_identity

RUN = "0123456789abcdef0123456789abcdef"


def make_run(path, texts, keys):
    identity = load_identity(keys / "owner")
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"run": RUN}))
    (path / "pki").symlink_to(keys)
    with AuditLog(path / "events.jsonl", identity, RUN) as log:
        for text in texts:
            log.append_event("note", {"text": text})


def call(*words, code=0):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_command(["witness", *map(str, words)]) == code
    return printed.getvalue()


def start_witness(home):
    words = [sys.executable, "-m", "phalanx", "witness", "serve", str(home), "--port", "0", "--json"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def keys(tmp_path):
    create_authority(tmp_path / "keys")
    issue_certificate(tmp_path / "keys", "owner")
    return tmp_path / "keys"


@pytest.fixture
def witnesses(tmp_path, keys):
    make_run(tmp_path / "run", ["a", "b", "c"], keys)
    (tmp_path / "run.vkey").write_text(call("keys", tmp_path / "run"))
    names, lines = ("w1", "w2", "w3"), [f"log {key}" for key in (tmp_path / "run.vkey").read_text().split()]
    printed = {name: call("init", tmp_path / name, "--name", f"example.org/{name}").split() for name in names}
    for name in names:
        call("trust", tmp_path / name, tmp_path / "run.vkey")
    processes = [start_witness(tmp_path / name) for name in names]
    for name, process in zip(names, processes, strict=True):
        url = json.loads(process.stdout.readline())["url"]
        kinds = zip(("classical", "safe"), printed[name], strict=True)
        lines += [f"witness {name}-{kind} {key} {url}" for kind, key in kinds]
    lines += ["group two-of-three 2 w1-safe w2-safe w3-safe", "quorum two-of-three", ""]
    (tmp_path / "policy").write_text("\n".join(lines))
    yield processes
    for process in processes:
        process.terminate()
    for process in processes:
        process.communicate(timeout=60)


@pytest.mark.slow
def test_a_quorum_of_two_of_three_survives_one_dead_witness_and_not_two(tmp_path, witnesses):
    run, policy, public = tmp_path / "run", ("--policy", tmp_path / "policy"), tmp_path / "public"
    printed = call("publish", run, *policy, "--to", public)
    assert printed.count("cosigned") == 3

    for number, code in ((0, 0), (1, 5)):
        witnesses[number].kill()
        witnesses[number].wait(timeout=60)
        printed = call("publish", run, *policy, "--to", public, code=code)
        assert printed.count("does not answer") == number + 1
        call("prove", run, "--from", public, "--line", 2, "--out", tmp_path / f"{number}.tlog-proof")

    assert '"text":"b"' in call("verify", tmp_path / "0.tlog-proof", *policy, "--both")
    call("verify", tmp_path / "1.tlog-proof", *policy, code=5)


@pytest.mark.slow
def test_witnesses_refuse_a_second_history_and_two_readers_prove_it(tmp_path, keys, witnesses):
    policy = ("--policy", tmp_path / "policy")
    make_run(tmp_path / "lie", ["a", "x", "c", "d"], keys)
    call("publish", tmp_path / "run", *policy, "--to", tmp_path / "one")

    printed = call("publish", tmp_path / "lie", *policy, "--to", tmp_path / "two", code=5)

    assert printed.count("refused with 422") == 3
    printed = call("compare", tmp_path / "one", tmp_path / "two", *policy, "--out", tmp_path / "fork.json", code=5)
    assert f"phalanx/{RUN} signed two histories" in printed
    call("compare", tmp_path / "fork.json", *policy, code=5)
    call("compare", tmp_path / "one", tmp_path / "one", *policy)
    call("init", tmp_path / "m1", "--name", "example.org/m1")
    call("mirror", tmp_path / "m1", tmp_path / "one", tmp_path / "copy", *policy)
    # nor into a new directory, nor by the keys of a witness that is at work
    for home, copy in (("m1", "copy"), ("m1", "new"), ("w1", "new")):
        call("mirror", tmp_path / home, tmp_path / "two", tmp_path / copy, *policy, code=5)
    call("compare", tmp_path / "copy", tmp_path / "two", *policy, code=5)
