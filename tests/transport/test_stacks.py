"""Stacks that an owner asks its workers for: answered while a worker computes, to nobody else, and taken as a claim."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.errors import FrameError, PeerLostError, PeerRefusedError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.transport import GrpcWire, TransportConfig, ask_peer_stacks
from phalanx.transport.stacks import MAX_STACKS_BYTES, describe_own_stacks, parse_stacks

LIMITS = TransportConfig(timeout_s=10.0)
FRAME = {"file": "worker.py", "line": 3, "function": "run"}


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    keys = tmp_path_factory.mktemp("pki") / "keys"
    create_authority(keys)
    for name in ("owner", "worker", "mallory"):
        issue_certificate(keys, name)
    return {name: load_identity(keys / name) for name in ("owner", "worker", "mallory")}


@pytest.fixture
def worker(identities):
    wire = GrpcWire(identities["worker"], LIMITS)
    wire.serve_frames(lambda raw, name: b"", "run-1")
    with contextlib.closing(wire):
        yield wire


def ask(identities, worker, by="owner"):
    return ask_peer_stacks(identities[by], "worker", worker.address, LIMITS, 60.0)


def answer_with(*threads):
    return json.dumps({"threads": [{"frames": list(frames)} for frames in threads]}).encode()


@contextlib.contextmanager
def hanging_thread():
    """A thread that computes without end, with a value that is nobody's business."""
    over, started = threading.Event(), threading.Event()

    def compute_for_ever(secret):
        started.set()
        over.wait()
        return secret

    thread = threading.Thread(target=compute_for_ever, args=("patient 4711",))
    thread.start()
    started.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_worker_that_hangs_tells_its_owner_where(identities, worker):
    worker.stacks_for = "owner"

    with hanging_thread():
        stacks = ask(identities, worker)

    lines = stacks.list_lines()
    assert lines[0] == "main thread:"
    assert any(line.startswith("  test_stacks.py:") and line.endswith(" compute_for_ever") for line in lines)


def test_a_worker_with_a_full_inbox_tells_its_owner_all_the_same(identities):
    """Every call that the owner may have open for frames is stuck, as when the worker's one thread hangs."""
    entered, over = threading.Semaphore(0), threading.Event()

    def take_frame(raw, name):
        entered.release()
        over.wait()
        return b""

    wire, owner = GrpcWire(identities["worker"], LIMITS), GrpcWire(identities["owner"], LIMITS)
    wire.serve_frames(take_frame, "run-1")
    wire.stacks_for = "owner"
    owner.add_route("worker", wire.address)
    with contextlib.closing(wire), contextlib.closing(owner), ThreadPoolExecutor(2) as pool:
        try:
            stuck = [pool.submit(owner.deliver_frame, "worker", b"frame", 60.0) for _ in range(2)]
            for _ in stuck:
                entered.acquire()

            lines = ask(identities, wire).list_lines()
        finally:
            over.set()

    assert any(line.endswith(" take_frame") for line in lines)


def test_stacks_have_places_and_no_value():
    with hanging_thread():
        raw = describe_own_stacks()

    assert b"compute_for_ever" in raw
    assert b"4711" not in raw
    assert b"/" not in raw


def test_nobody_but_the_owner_is_answered(identities, worker):
    with pytest.raises(PeerRefusedError, match="only the owner"):
        ask(identities, worker)
    worker.stacks_for = "owner"
    with pytest.raises(PeerRefusedError, match="only the owner"):
        ask(identities, worker, by="mallory")

    # the same question is answered where its asker is the owner
    worker.stacks_for = "mallory"
    assert ask(identities, worker, by="mallory").threads


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"threads": 3}',
        b"[" * 20_000,
        answer_with([FRAME | {"value": "patient 4711"}]),
        answer_with([FRAME | {"function": "\x1b[2Jrun"}]),
        answer_with([FRAME | {"function": "run()\nnext  rm -r ~"}]),
        answer_with([FRAME | {"file": "/home/north/worker.py"}]),
        answer_with([FRAME | {"file": "x" * 81}]),
        answer_with([FRAME | {"function": "ｒｕｎ"}]),
        answer_with([FRAME | {"line": -1}]),
        answer_with([FRAME | {"line": 10**9}]),
        answer_with([FRAME | {"line": "3"}]),
        answer_with([FRAME] * 25),
        answer_with(*[[FRAME]] * 17),
        answer_with([FRAME]) + b" " * MAX_STACKS_BYTES,
    ],
)
def test_a_worker_that_says_anything_else_is_refused(raw):
    with pytest.raises(FrameError, match=r"^stacks: "):
        parse_stacks(raw)


def test_the_longest_lists_are_taken():
    assert len(parse_stacks(answer_with(*[[FRAME] * 24] * 16)).threads) == 16


def test_a_worker_that_answers_with_megabytes_costs_its_owner_none(identities, monkeypatch):
    monkeypatch.setattr("phalanx.transport.grpc_wire.describe_own_stacks", lambda: b" " * (8 << 20))
    wire = GrpcWire(identities["worker"], LIMITS)
    wire.serve_frames(lambda raw, name: b"", "run-1")
    wire.stacks_for = "owner"

    with contextlib.closing(wire), pytest.raises(PeerLostError, match="resource_exhausted"):
        ask(identities, wire)
