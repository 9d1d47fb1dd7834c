"""A pipe to an enclave without a network: frames of several parties over one pair of sockets."""

import socket
import struct
import threading

import pytest

from phalanx.errors import PeerGoneError, PeerLostError
from phalanx.split.channel.frame_pipe import FramePipe


@pytest.fixture
def ends():
    """The parties' end and the enclave's."""
    pair = socket.socketpair()
    made = [FramePipe(one, 1000) for one in pair]
    yield made
    for one in made:
        one.close()


def test_questions_of_several_parties_are_answered_both_ways_at_once(ends):
    near, far = ends
    far.open_wire("enclave").serve_frames(lambda raw, sender: b"enclave got " + raw + b" of " + sender.encode(), "run")
    for name in ("owner", "client-0"):
        near.open_wire(name).serve_frames(lambda raw, sender, name=name: name.encode() + b" got " + raw, "run")
    found = {}

    def ask(wire, receiver, raw):
        found[raw] = wire.deliver_frame(receiver, raw, 10.0)

    threads = [
        threading.Thread(target=ask, args=(near.open_wire(name), "enclave", f"{name} {number}".encode()))
        for name in ("owner", "client-0")
        for number in range(20)
    ]
    threads += [
        threading.Thread(target=ask, args=(far.open_wire("enclave"), "owner", b"%d" % number)) for number in range(9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120.0)

    assert len(found) == 49
    assert found[b"owner 7"] == b"enclave got owner 7 of owner"
    assert found[b"5"] == b"owner got 5"


def test_a_question_to_a_party_that_serves_a_moment_later_is_answered(ends):
    near, far = ends
    found = []
    asker = threading.Thread(target=lambda: found.append(near.open_wire("owner").deliver_frame("enclave", b"x", 10.0)))
    asker.start()
    # answered by a party that serves from the start: what was sent before has been read by then
    far.open_wire("client").serve_frames(lambda raw, sender: raw, "run")
    near.open_wire("owner").deliver_frame("client", b"y", 10.0)

    far.open_wire("enclave").serve_frames(lambda raw, sender: b"got " + raw, "run")
    asker.join(120.0)

    assert found == [b"got x"]


def test_only_so_many_questions_are_kept_for_a_party_that_never_serves(ends):
    near, far = ends
    far.open_wire("client").serve_frames(lambda raw, sender: raw, "run")
    for _ in range(20):
        with pytest.raises(PeerLostError):
            near.open_wire("owner").deliver_frame("nobody", b"x", 0.0)
    near.open_wire("owner").deliver_frame("client", b"y", 10.0)
    answered = []

    far.open_wire("nobody").serve_frames(lambda raw, sender: answered.append(raw) or b"", "run")
    near.open_wire("owner").deliver_frame("nobody", b"z", 10.0)

    assert 1 <= answered.count(b"x") <= 8


def test_who_waits_for_an_end_that_closes_is_told(ends):
    near, far = ends
    asked = threading.Event()
    far.open_wire("enclave").serve_frames(lambda raw, sender: asked.set() or far.close() or b"", "run")

    with pytest.raises(PeerGoneError):
        near.open_wire("owner").deliver_frame("enclave", b"x", 10.0)

    assert asked.is_set()
    with pytest.raises(PeerGoneError):
        near.open_wire("owner").deliver_frame("enclave", b"x", 10.0)


def test_who_is_not_there_and_who_is_silent_is_lost_in_time(ends):
    near, _ = ends

    with pytest.raises(PeerLostError, match="no answer within"):
        near.open_wire("owner").deliver_frame("nobody", b"x", 0.05)


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack(">Q", 2**40),
        struct.pack(">Q", 0),
        struct.pack(">Q", 12) + b"\0" * 8 + b"\0\xff\xff\xff",
        b"\xff" * 100,
    ],
)
def test_garbage_ends_the_pipe_and_takes_no_memory(garbage):
    here, there = socket.socketpair()
    pipe = FramePipe(here, 1000)
    pipe.open_wire("owner").serve_frames(lambda raw, sender: b"", "run")

    there.sendall(garbage)

    with pytest.raises(PeerLostError):
        pipe.open_wire("owner").deliver_frame("enclave", b"x", 0.2)
    pipe.close()
    there.close()
