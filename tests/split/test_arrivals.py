"""Parties that call an enclave: which are let in, when a session is over, and frames through a pipe."""

import socket

import pytest

from phalanx.errors import PeerLostError, PeerRefusedError
from phalanx.security.crypto import Identity
from phalanx.split import ENCLAVE
from phalanx.split.channel.frame_pipe import FramePipe
from phalanx.split.processes.arrivals import Arrivals, PipeRelay
from phalanx.transport import Endpoint, JoinedPeer, TransportConfig

LIMITS = TransportConfig(timeout_s=20.0)


def test_a_stranger_is_refused_and_said_once():
    said = []
    arrivals = Arrivals(("owner", "north"), said.append)

    for _ in range(3):
        with pytest.raises(PeerRefusedError, match="is not a party of this run"):
            arrivals.name_of("mallory", True)

    assert said == ["refused a caller: mallory is not a party of this run"]


def test_a_process_that_begins_anew_ends_the_session_and_one_that_looks_does_not():
    arrivals = Arrivals(("owner", "north"), lambda line: None)
    assert arrivals.name_of("north", True) == "north"

    assert arrivals.name_of("north", False) == "north"
    arrivals.check_returned()
    assert arrivals.name_of("north", True) is None

    with pytest.raises(PeerLostError, match="north: has restarted"):
        arrivals.check_returned()


class Called:
    """A wire that two parties have called, one of them only to look."""

    def __init__(self, names):
        self.names, self.asked = names, 0

    def wait_joined(self, name, timeout_s):
        self.asked += 1
        return JoinedPeer(Identity.without_certificate(name).public, "here", "") if name in self.names else None


def test_a_party_that_only_looked_has_not_come():
    arrivals, wire = Arrivals(("owner", "north"), lambda line: None), Called({"owner", "north"})
    arrivals.name_of("owner", True)
    arrivals.name_of("north", False)

    def begin_at_last(name, timeout_s):
        if wire.asked == 5:
            arrivals.name_of("north", True)
        return Called.wait_joined(wire, name, timeout_s)

    wire_of = type("Wire", (), {"wait_joined": staticmethod(begin_at_last)})

    assert set(arrivals.wait_for_all(wire_of)) == {"owner", "north"}
    assert wire.asked > 5


def test_a_party_that_has_begun_and_has_not_shown_its_keys_yet_is_waited_for():
    arrivals, wire = Arrivals(("owner", "north"), lambda line: None), Called({"owner"})
    for name in ("owner", "north"):
        arrivals.name_of(name, True)

    def show_at_last(name, timeout_s):
        if wire.asked == 3:
            wire.names.add("north")
        return Called.wait_joined(wire, name, timeout_s)

    found = arrivals.wait_for_all(type("Wire", (), {"wait_joined": staticmethod(show_at_last)}))

    assert {name: joined.peer.name for name, joined in found.items()} == {"owner": "owner", "north": "north"}


class Network:
    """The network beside the relay: it delivers to one party, or to none."""

    def __init__(self):
        self.handle, self.asked = None, []

    def deliver_frame(self, receiver, raw, timeout_s):
        self.asked.append(receiver)
        if self.handle is None:
            raise PeerLostError(f"{receiver}: is not there yet")
        return self.handle(raw, ENCLAVE)


class Outside:
    """A wire of a party on the network, by way of the relay."""

    def __init__(self, relay, network, name):
        self.relay, self.network, self.name = relay, network, name

    def serve_frames(self, handle, run):
        self.network.handle = handle

    def add_route(self, name, address):
        pass

    def deliver_frame(self, receiver, raw, timeout_s):
        return self.relay.pass_inward(raw, self.name)

    def close(self):
        pass


def test_frames_reach_a_sandbox_by_way_of_the_relay_and_answers_come_back():
    near, far = socket.socketpair()
    outer, inner = FramePipe(near, LIMITS.max_frame_bytes), FramePipe(far, LIMITS.max_frame_bytes)
    network = Network()
    relay = PipeRelay(outer, network, ("north",), 5.0)
    north, enclave = Identity.without_certificate("north"), Identity.without_certificate(ENCLAVE)
    try:
        with (
            Endpoint(enclave, {"north": north.public}, "s", inner.open_wire(ENCLAVE), LIMITS) as inside,
            Endpoint(north, {ENCLAVE: enclave.public}, "s", Outside(relay, network, "north"), LIMITS) as outside,
        ):
            outside.send_frame(ENCLAVE, "question", {"n": 1}, (b"payload",))
            got = inside.receive_item(10.0)
            assert (got.sender, got.kind, bytes(got.payload)) == ("north", "question", b"payload")

            # nobody listens at first: the sender inside tries again
            handle, network.handle = network.handle, None
            inside.send_frame("north", "answer", {"n": 2})
            while not network.asked:
                pass
            network.handle = handle
            assert outside.receive_item(10.0).kind == "answer"

            # another party's frame under the name of one that has another key
            refused = relay.pass_inward(b"nonsense", "mallory")
            assert b"is not a party of this run" in refused
    finally:
        outer.close()
        inner.close()


def test_a_frame_for_an_enclave_that_is_gone_may_be_tried_again():
    near, far = socket.socketpair()
    pipe = FramePipe(near, LIMITS.max_frame_bytes)
    relay = PipeRelay(pipe, Network(), ("north",), 5.0)
    far.close()
    pipe.close()

    assert b"PeerLostError" in relay.pass_inward(b"frame", "north")
