"""A party that listens nowhere dials out through a relay; frames come on its stream, and the relay reads nothing."""

import contextlib
import secrets
import socket
import sys
import threading
import time
import traceback
from datetime import UTC, datetime, timedelta

import pytest

from machine_patience import patience_s
from phalanx.errors import PeerLostError, PeerRefusedError
from phalanx.security.crypto import create_authority, issue_certificate, load_identity
from phalanx.transport import Endpoint, GrpcWire, TransportConfig, ask_peer_run
from phalanx.transport.dialled_stream import DialledStream

LIMITS = TransportConfig(timeout_s=60.0, max_frame_bytes=2**20, max_queued_bytes=2**22)
SECRET = b"a patient's diagnosis, of which a relay must not see one byte " * 20


class Relay:
    """A relay of bytes between two sockets, as a router or a rented machine is; it notes all, and can cut all lines."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target, self.seen = (host, int(port)), bytearray()
        self._lines: set[socket.socket] = set()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with self._listener:
            while not self._closed.is_set():
                try:
                    near, _ = self._listener.accept()
                    far = socket.create_connection(self._target)
                except OSError:
                    continue
                near.settimeout(None)
                for one, other in ((near, far), (far, near)):
                    self._lines.add(one)
                    self._threads.append(threading.Thread(target=self._pass, args=(one, other)))
                    self._threads[-1].start()

    def _pass(self, one, other):
        with one, contextlib.suppress(OSError):
            while part := one.recv(65536):
                self.seen += part
                other.sendall(part)
        self._lines.discard(one)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)

    def cut(self):
        for line in list(self._lines):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._closed.set()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join(patience_s(10.0))


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pki")
    create_authority(directory)
    for name in ("enclave", "north", "south"):
        issue_certificate(directory, name)
    return {name: load_identity(directory / name) for name in ("enclave", "north", "south")}


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def open_party(identities, opened):
    def make(name):
        wire = GrpcWire(identities[name], LIMITS)
        peers = {other: one.public for other, one in identities.items() if other != name}
        endpoint = opened.enter_context(Endpoint(identities[name], peers, "run-1", wire, LIMITS))
        return wire, endpoint

    return make


@pytest.fixture
def pair(open_party, identities, opened):
    """An enclave that offers streams, and a client that reaches it by a relay and is reached by nobody."""
    wire, enclave = open_party("enclave")
    wire.has_dialled_streams = True
    relay = Relay(wire.address)
    opened.callback(relay.close)
    client_wire, client = open_party("north")
    client.add_peer(identities["enclave"].public, relay.address)
    client_wire.collect_frames("enclave")
    return wire, enclave, client_wire, client, relay


def take(endpoint, count):
    found = []
    limit = time.monotonic() + patience_s(60.0)
    while len(found) < count and time.monotonic() < limit:
        item = endpoint.receive_item(1.0)
        if item is not None:
            found.append((item.sender, item.body["number"], bytes(item.payload)))
    return found


def test_frames_reach_a_party_that_listens_nowhere_through_a_relay_that_reads_nothing(pair):
    _, enclave, client_wire, client, relay = pair
    # nobody knows where it listens, and it would let nobody in
    client_wire._server.stop(grace=None).wait(10.0)

    for number in range(20):
        enclave.send_frame("north", "word", {"number": number}, (SECRET,))
        client.send_frame("enclave", "word", {"number": number}, (SECRET[::-1],))

    assert take(client, 20) == [("enclave", number, SECRET) for number in range(20)]
    assert take(enclave, 20) == [("north", number, SECRET[::-1]) for number in range(20)]
    assert len(relay.seen) > 40 * len(SECRET)
    assert SECRET[:16] not in relay.seen
    assert b"word" not in relay.seen


def test_a_line_that_is_cut_again_and_again_loses_and_doubles_no_frame(pair):
    _, enclave, _, client, relay = pair

    for number in range(6):
        enclave.send_frame("north", "word", {"number": number}, (SECRET,))
        if number % 2:
            relay.cut()

    assert [number for _, number, _ in take(client, 6)] == list(range(6))
    assert client.receive_item(0.2) is None


def test_another_party_of_the_authority_gets_its_own_frames_and_no_other(pair, open_party, identities):
    _, enclave, _, client, relay = pair
    south_wire, south = open_party("south")
    south.add_peer(identities["enclave"].public, relay.address)
    south_wire.collect_frames("enclave")

    enclave.send_frame("north", "word", {"number": 1}, (SECRET,))
    enclave.send_frame("south", "word", {"number": 2}, (SECRET,))

    assert take(client, 1) == [("enclave", 1, SECRET)]
    assert take(south, 1) == [("enclave", 2, SECRET)]
    assert client.receive_item(0.2) is None
    assert south.receive_item(0.2) is None


def collect_once(identity, address):
    from phalanx.transport.grpc_tls import grpc, open_channel

    channel = open_channel(identity, "enclave", address, LIMITS)
    try:
        next(channel.stream_stream("/phalanx.Transport/Collect")(iter(())))
    except grpc.RpcError as exc:
        return exc.code().name
    finally:
        channel.close()


def test_who_is_no_party_opens_no_stream_and_where_none_are_offered_nobody_does(open_party, identities):
    wire, _ = open_party("enclave")
    assert collect_once(identities["north"], wire.address) == "UNIMPLEMENTED"
    wire.has_dialled_streams = True

    def only_north(certified, begins):
        if certified != "north":
            raise PeerRefusedError(f"{certified}: is not a party of this run")
        return certified

    wire.name_of = only_north

    assert collect_once(identities["south"], wire.address) == "PERMISSION_DENIED"
    assert wire._streams == {}


def test_a_stream_ends_with_the_certificate_that_opened_it():
    stream = DialledStream("north", datetime.now(UTC) - timedelta(seconds=1))

    with pytest.raises(PeerLostError, match="has ended"):
        stream.exchange_frame(b"frame", 1.0)
    assert list(stream.pop_questions()) == []


def test_an_answer_to_nothing_is_passed_over_and_a_closed_stream_wakes_who_waits():
    stream = DialledStream("north", datetime.now(UTC) + timedelta(days=1))
    stream.take_answers([b"", b"short", secrets.token_bytes(20)])
    outcome = []

    def wait():
        try:
            stream.exchange_frame(b"frame", patience_s(60.0))
        except PeerLostError as exc:
            outcome.append(str(exc))

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert next(stream.pop_questions())[8:] == b"frame"
    stream.close()
    waiting.join(patience_s(30.0))

    assert outcome == ["north: its stream has ended"]


def test_a_frame_that_is_not_answered_in_time_is_forgotten_and_its_late_answer_passed_over():
    stream = DialledStream("north", datetime.now(UTC) + timedelta(days=1))

    for _ in range(3):
        with pytest.raises(PeerLostError, match="no answer on its stream"):
            stream.exchange_frame(b"frame", 0.01)

    assert stream._waiting == {}
    number = next(stream.pop_questions())[:8]
    stream.take_answers([number + b"late"])
    assert stream._waiting == {}


def test_a_party_that_listens_nowhere_tells_no_address(pair, identities):
    wire, _, _, _, relay = pair

    met = ask_peer_run(identities["north"], "enclave", relay.address, "", LIMITS, begins=True)

    assert met.run == "run-1"
    assert wire.wait_joined("north", 1.0).address == ""


def threads_that_send():
    """Count this process's threads that wait for a party to take a piece of its stream."""
    stacks = [traceback.walk_stack(frame) for frame in sys._current_frames().values()]
    return sum(any(frame.f_code.co_name == "_send_response" for frame, _ in stack) for stack in stacks)


def wait_until(holds):
    limit = time.monotonic() + patience_s(60.0)
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.05)


def test_a_party_that_dials_again_and_takes_nothing_holds_no_more_than_one_thread_and_one_frame(
    open_party, identities, opened
):
    from phalanx.transport.grpc_tls import open_channel

    bounds = {"max_frame_bytes": 2**25, "max_queued_bytes": 2**26}
    # a link gives its frame up only where the test does
    limits = LIMITS.model_copy(update={**bounds, "timeout_s": 86400.0})
    wire = GrpcWire(identities["enclave"], limits)
    wire.has_dialled_streams = True
    peers = {"north": identities["north"].public}
    enclave = opened.enter_context(Endpoint(identities["enclave"], peers, "run-1", wire, limits))
    before, ended = threads_that_send(), threading.Event()
    # more than gRPC takes off a party's hands
    enclave.send_frame("north", "word", {"number": 1}, (bytes(2**23),))

    streams, calls = [], []
    for _ in range(4):
        channel = open_channel(identities["north"], "enclave", wire.address, limits)
        opened.callback(channel.close)
        calls.append(channel.stream_stream("/phalanx.Transport/Collect")(iter(ended.wait, True)))
        wait_until(lambda: wire._streams.get("north") not in (None, *streams))
        streams.append(wire._streams["north"])
        # the frame is on its way on the newest stream
        wait_until(lambda: streams[-1]._waiting and streams[-1]._questions.empty())

    opened.callback(ended.set)

    wait_until(lambda: threads_that_send() - before <= 1)
    assert threads_that_send() - before <= 1
