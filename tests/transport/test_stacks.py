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
    names = ("owner", "worker", "mallory", "enclave")
    for name in names:
        issue_certificate(keys, name)
    return {name: load_identity(keys / name) for name in names}


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


@pytest.fixture
def enclave(identities, worker):
    """One that asks the worker, a party of its session, in place of the owner."""
    wire = GrpcWire(identities["enclave"], LIMITS, passes_stacks_to="owner")
    wire.serve_frames(lambda raw, name: b"", "run-1")
    wire.add_route("worker", worker.address)
    with contextlib.closing(wire):
        yield wire


def ask_enclave(identities, enclave, by="owner", of="worker"):
    return ask_peer_stacks(identities[by], "enclave", enclave.address, LIMITS, 60.0, of)


def test_a_client_of_an_enclave_tells_the_owner_by_way_of_it_and_nobody_else(identities, worker, enclave):
    worker.stacks_for = "enclave"

    with hanging_thread():
        lines = ask_enclave(identities, enclave).list_lines()

    assert any(line.endswith(" compute_for_ever") for line in lines)
    with pytest.raises(PeerRefusedError, match="only the owner"):
        ask(identities, worker)
    with pytest.raises(PeerRefusedError, match="only the owner"):
        ask_enclave(identities, enclave, by="mallory")


def test_an_enclave_says_nothing_of_itself_and_asks_no_stranger(identities, enclave):
    with pytest.raises(PeerRefusedError, match="only the owner"):
        ask_enclave(identities, enclave, of="")
    with pytest.raises(PeerLostError, match="no party of this name"):
        ask_enclave(identities, enclave, of="mallory")


def test_that_a_client_does_not_answer_its_enclave_reaches_the_owner(identities, enclave):
    with pytest.raises(PeerLostError, match="worker: only the owner may ask"):
        ask_enclave(identities, enclave)


def test_an_owner_gets_no_stream_of_stacks(identities, worker):
    worker.stacks_for = "owner"
    for _ in range(16):
        ask(identities, worker)

    with pytest.raises(PeerLostError, match="no more stacks"):
        ask(identities, worker)


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
