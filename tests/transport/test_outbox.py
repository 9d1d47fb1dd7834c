"""The sending side of one link by itself: sealed in order, delivered once, ended with a reason."""

import threading

import pytest

from phalanx.errors import FrameError, OrderError, PeerLostError, PeerRefusedError
from phalanx.security.crypto import Identity, digest_hex
from phalanx.transport import TransportConfig, parse_frame
from phalanx.transport.frame import sign_receipt
from phalanx.transport.inbox import LinkFault
from phalanx.transport.link import CpuMeter, SendingChain, encode_receipt, encode_refusal
from phalanx.transport.outbox import DeliveredFrame, Outbox, Payload

SECONDS = 20.0
LIMITS = TransportConfig(timeout_s=SECONDS, max_frame_bytes=2**16, max_queued_bytes=2**16)


class Wire:
    """Signs for every frame as its receiver would, when it is let to; `answer` says something else.

    Attributes:
        arrived: The frames, in order, as often as they were delivered.
    """

    def __init__(self, receiver):
        self.receiver, self.arrived, self.open, self.answer = receiver, [], threading.Event(), None

    def deliver_frame(self, name, raw, timeout_s):
        assert self.open.wait(SECONDS)
        header = parse_frame(raw, LIMITS).header
        self.arrived.append(header.fields.sequence)
        found = None if self.answer is None else self.answer(header)
        return encode_receipt(sign_receipt(self.receiver, header.header_digest)) if found is None else found


class Link:
    def __init__(self, limits=LIMITS):
        worker, owner = (Identity.without_certificate(name) for name in ("worker", "owner"))
        self.wire, self.reported, self.news = Wire(owner), [], threading.Condition()
        chain = SendingChain(worker, "run-1", "owner", limits)
        self.outbox = Outbox(chain, owner.public, self.wire, limits, CpuMeter(), report=self.report)

    def report(self, found):
        with self.news:
            self.reported.append(found)
            self.news.notify_all()

    def wait_for(self, number):
        with self.news:
            assert self.news.wait_for(lambda: len(self.reported) >= number, SECONDS)
        return self.reported

    def close(self):
        self.wire.open.set()
        self.outbox.drop_queue(PeerLostError("the test is over"))
        self.outbox.join_thread(SECONDS)

    def put(self, size_bytes=0):
        data = bytes(size_bytes)
        return self.outbox.queue_frame("tensor", {}, Payload([data], size_bytes, digest_hex(data)))


@pytest.fixture
def link():
    found = Link()
    yield found
    found.close()


def test_frames_are_delivered_in_order_and_each_is_reported_with_its_receipt(link):
    sent = [link.put(n) for n in range(3)]
    link.wire.open.set()
    link.outbox.wait_until_taken(SECONDS)

    assert link.wire.arrived == [0, 1, 2]
    reported = link.wait_for(3)
    assert [(found.header, found.receipt.header_digest) for found in reported] == [
        (header, header.header_digest) for header in sent
    ]
    assert all(isinstance(found, DeliveredFrame) for found in reported)


def test_an_outbox_is_busy_until_its_last_frame_is_signed_for(link):
    assert not link.outbox.is_busy
    link.put()
    assert link.outbox.is_busy

    link.wire.open.set()
    link.outbox.wait_until_taken(SECONDS)

    assert not link.outbox.is_busy


def test_a_flush_that_takes_too_long_says_how_many_frames_wait(link):
    link.put()
    link.put()

    with pytest.raises(PeerLostError, match="owner: 2 frames have no answer yet"):
        link.outbox.wait_until_taken(0.0)


def test_a_frame_that_is_too_large_leaves_the_link_as_it_was(link):
    with pytest.raises(FrameError, match="max_frame_bytes"):
        link.put(2**16)

    assert link.put().fields.sequence == 0


def test_payload_that_just_fits_is_queued_and_one_byte_more_ends_the_link_after_its_deadline():
    link = Link(LIMITS.model_copy(update={"timeout_s": 0.01}))
    link.put(2**15)

    assert link.put(2**16 - link.outbox._queued_bytes).fields.sequence == 1
    queued = link.outbox._queued_bytes
    with pytest.raises(PeerLostError, match=rf"{queued} bytes are queued and did not move for 0\.01 s"):
        link.put(1)
    assert isinstance(link.wait_for(1)[0], LinkFault)
    link.close()


def test_words_pass_a_queue_that_is_full_of_tensors(link):
    link.put(2**15)
    link.put(2**15 - 2000)

    assert link.put().fields.sequence == 2


def test_an_answer_that_ends_the_link_is_reported_once_and_what_was_queued_can_be_had_once(link):
    link.wire.answer = lambda header: encode_refusal(OrderError("a gap"))
    sent = [link.put(), link.put()]
    link.wire.open.set()

    (found,) = link.wait_for(1)

    assert (found.peer, type(found.error), link.wire.arrived) == ("owner", OrderError, [0])
    with pytest.raises(PeerLostError, match=r"the link has failed: .*a gap"):
        link.put()
    assert [header for header, _ in link.outbox.take_undelivered()] == sent
    assert link.outbox.take_undelivered() == []
    assert len(link.reported) == 1


def test_a_frame_put_aside_follows_in_the_chain_and_is_never_delivered(link):
    link.wire.answer = lambda header: encode_refusal(OrderError("a gap"))
    first = link.put()
    link.wire.open.set()
    link.wait_for(1)

    aside = link.outbox.put_aside("tensor", {}, Payload([b""], 0, digest_hex(b"")))

    assert (aside.fields.sequence, aside.fields.previous) == (1, first.header_digest)
    assert link.wire.arrived == [0]


def test_nothing_is_put_aside_of_an_open_link(link):
    with pytest.raises(PeerRefusedError, match="its link is open"):
        link.outbox.put_aside("tensor", {}, Payload([b""], 0, digest_hex(b"")))


def test_a_dropped_link_says_why_reports_nothing_and_keeps_nothing(link):
    link.put()

    assert link.outbox.drop_queue(PeerRefusedError("owner: was evicted"))
    assert not link.outbox.drop_queue(PeerLostError("again"))
    link.wire.open.set()
    link.outbox.join_thread(SECONDS)

    with pytest.raises(PeerRefusedError, match="was evicted"):
        link.put()
    assert (link.outbox.take_undelivered(), link.outbox.is_busy) == ([], False)
    assert [found for found in link.reported if isinstance(found, LinkFault)] == []


def test_a_lost_answer_has_the_same_frame_sent_again(link):
    def lose_the_first(header):
        if len(link.wire.arrived) == 1:
            raise PeerLostError("answer lost")

    link.wire.answer = lose_the_first
    link.put()
    link.wire.open.set()
    link.outbox.wait_until_taken(SECONDS)

    assert link.wire.arrived == [0, 0]
    assert len(link.wait_for(1)) == 1


def test_a_fault_of_ours_in_the_delivering_thread_ends_the_link_and_is_reported(link, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda about: None)

    def broken(header):
        raise ZeroDivisionError

    link.wire.answer = broken
    link.put()
    link.wire.open.set()

    (found,) = link.wait_for(1)
    # it reports before it ends, and its end calls the hook
    link.outbox.join_thread(SECONDS)

    assert "its sending thread ended" in str(found.error)


def test_a_link_that_is_dropped_while_it_tries_again_tries_no_more():
    link = Link(LIMITS.model_copy(update={"timeout_s": 10 * SECONDS}))
    tried = threading.Event()

    def lose(header):
        tried.set()
        raise PeerLostError("answer lost")

    link.wire.answer = lose
    link.wire.open.set()
    link.put()
    assert tried.wait(SECONDS)

    link.outbox.drop_queue(PeerRefusedError("owner: was evicted"))
    link.outbox.join_thread(SECONDS)

    assert not link.outbox._thread.is_alive()
