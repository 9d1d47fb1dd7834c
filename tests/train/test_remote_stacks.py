"""Stacks of remote workers beside a run: each worker is asked once, and who says nothing is written down as well."""

import contextlib
import json
import socket
import threading

import pytest

from phalanx.errors import DiskError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.telemetry import STACKS_FILE
from phalanx.train.sessions import remote_stacks
from phalanx.train.sessions.remote_stacks import RemoteStacks
from phalanx.transport import GrpcWire, TransportConfig
from phalanx.transport.stacks import parse_stacks

LIMITS = TransportConfig(timeout_s=10.0)


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    keys = tmp_path_factory.mktemp("pki") / "keys"
    create_authority(keys)
    for name in ("owner", "north"):
        issue_certificate(keys, name)
    return {name: load_identity(keys / name) for name in ("owner", "north")}


@pytest.fixture
def north(identities):
    wire = GrpcWire(identities["north"], LIMITS, stacks_for="owner")
    wire.serve_frames(lambda raw, name: b"", "run-1")
    with contextlib.closing(wire):
        yield wire


@pytest.fixture
def silent():
    """An address at which somebody listens who says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def read(path):
    return json.loads((path / STACKS_FILE).read_text())


def test_a_failed_run_has_the_word_of_each_worker(identities, north, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_stacks, "_ANSWER_S", 60.0)
    monkeypatch.setattr(remote_stacks, "_CLOSE_S", 60.0)

    with RemoteStacks(identities["owner"], LIMITS, tmp_path, {"north": north.address}) as stacks:
        stacks.ask_after_failure(ValueError, ["north", "one that never joined"])

    answers = read(tmp_path)
    assert list(answers) == ["north"]
    assert parse_stacks(json.dumps(answers["north"]).encode()).threads


def test_that_workers_say_nothing_is_written_down_before_the_end(identities, silent, tmp_path, monkeypatch):
    monkeypatch.setattr(remote_stacks, "_ANSWER_S", 0.5)
    names = [f"silent-{number}" for number in range(6)]

    with RemoteStacks(identities["owner"], LIMITS, tmp_path, dict.fromkeys(names, silent)) as stacks:
        stacks.ask_after_failure(ValueError, names)

    answers = read(tmp_path)
    assert sorted(answers) == names
    assert all(answers[name]["error"].startswith(f"{name}: ") for name in names)


@pytest.mark.parametrize("kind", [None, KeyboardInterrupt, SystemExit])
def test_nobody_is_asked_where_a_run_ends_well_or_a_person_ends_it(identities, north, tmp_path, kind):
    (tmp_path / STACKS_FILE).write_text("of an earlier session")

    with RemoteStacks(identities["owner"], LIMITS, tmp_path, {"north": north.address}) as stacks:
        stacks.ask_after_failure(kind, ["north"])

    assert not (tmp_path / STACKS_FILE).exists()


def test_a_worker_that_was_given_up_is_not_asked_again_when_the_run_fails(identities, tmp_path, monkeypatch):
    asked, over = [], threading.Event()

    def ask(identity, name, *rest):
        asked.append(name)
        over.wait()
        raise DiskError("\x1b[2J")

    monkeypatch.setattr(remote_stacks, "ask_peer_stacks", ask)
    with RemoteStacks(identities["owner"], LIMITS, tmp_path, {"north": "", "south": ""}) as stacks:
        # a run waits for no answer
        stacks.ask_in_background("north")
        stacks.ask_after_failure(ValueError, ["north", "south"])
        over.set()

    assert sorted(asked) == ["north", "south"]
    assert "\x1b" not in read(tmp_path)["north"]["error"]


def test_a_party_that_answered_when_it_was_late_and_is_gone_since_keeps_its_stacks(identities, tmp_path, monkeypatch):
    answers = [parse_stacks(b'{"threads": [{"frames": [{"file": "client.py", "line": 3, "function": "run"}]}]}')]

    def ask(identity, name, address, transport, timeout_s, of):
        assert (name, of) == ("enclave", "north")
        if not answers:
            raise DiskError("is gone")
        return answers.pop()

    monkeypatch.setattr(remote_stacks, "ask_peer_stacks", ask)
    with RemoteStacks(identities["owner"], LIMITS, tmp_path, {"north": ""}, through="enclave") as stacks:
        stacks.ask_in_background("north")
        stacks.close()
        stacks.ask_after_failure(ValueError, ["north"])

    assert not answers
    assert read(tmp_path)["north"]["threads"][0]["frames"][0]["file"] == "client.py"


def test_a_full_disk_costs_the_card_its_stacks_and_nothing_else(identities, north, tmp_path, monkeypatch):
    def fail(*written):
        raise DiskError("no space left on device")

    monkeypatch.setattr(remote_stacks, "replace_file", fail)
    with RemoteStacks(identities["owner"], LIMITS, tmp_path, {"north": north.address}) as stacks:
        stacks.ask_in_background("north")

    assert not (tmp_path / STACKS_FILE).exists()
