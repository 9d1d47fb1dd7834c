"""What the sending side does when the wire or the other end misbehaves."""

import threading

import pytest
from made_frames import frame_bytes, header_values, refusal

from phalanx.errors import FrameError, OrderError, PeerGoneError, PeerLostError, PeerRefusedError, SignatureError
from phalanx.transport import LinkFault, TransportConfig, outbox
from phalanx.transport.frame import sign_receipt
from phalanx.transport.link import encode_receipt, encode_refusal

SHORT = TransportConfig(timeout_s=0.3, max_frame_bytes=2**20, max_queued_bytes=2**20)


def patient(timeout_s):
    return SHORT.model_copy(update={"timeout_s": timeout_s})


class LosingWire:
    """Delivers, but loses the first answers on the way back."""

    def __init__(self, inner, num_lost):
        self.inner, self.num_lost, self.num_calls = inner, num_lost, 0

    def serve_frames(self, handle, run):
        self.inner.serve_frames(handle, run)

    def add_route(self, name, address):
        self.inner.add_route(name, address)

    def deliver_frame(self, receiver, raw, timeout_s):
        self.num_calls += 1
        answer = self.inner.deliver_frame(receiver, raw, timeout_s)
        if self.num_calls <= self.num_lost:
            raise PeerLostError("answer lost")
        return answer

    def close(self):
        self.inner.close()


class AnsweringWire(LosingWire):
    """Answers every frame by itself, in a way that the test decides."""

    def __init__(self, answer):
        self.answer, self.num_calls = answer, 0

    def serve_frames(self, handle, run):
        pass

    def deliver_frame(self, receiver, raw, timeout_s):
        self.num_calls += 1
        return self.answer(raw)

    def close(self):
        pass


class HeldWire(AnsweringWire):
    """Delivers nothing until it is released."""

    def __init__(self):
        self.released = threading.Event()
        super().__init__(None)

    def deliver_frame(self, receiver, raw, timeout_s):
        self.released.wait(timeout_s)
        raise PeerLostError("held")

    def close(self):
        self.released.set()


def test_a_frame_whose_answer_was_lost_is_sent_again_and_delivered_once(parties):
    owner = parties.make("owner")
    wire = LosingWire(parties.network.wire_for("worker"), num_lost=2)
    worker = parties.make("worker", wire=wire)

    sent = [worker.send_frame("owner", "activation", {"n": n}) for n in range(3)]
    worker.flush_frames(5.0)

    assert wire.num_calls == 5
    assert [owner.receive_item(1.0).body["n"] for _ in range(3)] == [0, 1, 2]
    assert owner.receive_item(0.0) is None
    assert all(worker.receipts.get_proof(header.header_digest) for header in sent)
    assert worker.receive_item(0.0) is None


def test_a_party_that_comes_late_is_reached(parties):
    worker = parties.make("worker")
    worker.send_frame("owner", "activation", {})

    owner = parties.make("owner")

    assert owner.receive_item(5.0).kind == "activation"


def test_a_party_that_never_answers_is_lost_within_the_deadline(parties):
    worker = parties.make("worker", SHORT)

    worker.send_frame("owner", "activation", {})
    fault = worker.receive_item(5.0)

    assert fault.peer == "owner"
    assert isinstance(fault.error, PeerLostError)
    assert "0.3 s" in str(fault.error)
    with pytest.raises(PeerLostError, match="has failed"):
        worker.send_frame("owner", "activation", {})
    worker.flush_frames(1.0)


def forged_receipt(parties):
    return lambda raw: encode_receipt(sign_receipt(parties.identities["mallory"], "0" * 64))


def receipt_for_another_frame(parties):
    return lambda raw: encode_receipt(sign_receipt(parties.identities["owner"], "0" * 64))


def order_refusal(parties):
    return lambda raw: encode_refusal(OrderError("replayed"))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (forged_receipt, SignatureError),
        (receipt_for_another_frame, SignatureError),
        (order_refusal, OrderError),
        (lambda parties: lambda raw: encode_refusal(PeerRefusedError("evicted")), PeerRefusedError),
        (lambda parties: lambda raw: b"", FrameError),
        (lambda parties: lambda raw: b"PHLA\x02\x00short", FrameError),
        (lambda parties: lambda raw: b"PHLA\x01\x00" + bytes(64), FrameError),
        (lambda parties: lambda raw: b"PHLA\x02\x07" + bytes(64), FrameError),
        (lambda parties: lambda raw: b"PHLA\x02\x01not json", FrameError),
        (lambda parties: lambda raw: b'PHLA\x02\x01{"error":"SystemExit","message":""}', FrameError),
        (lambda parties: lambda raw: b'PHLA\x02\x01{"error":1,"message":2}', FrameError),
        (lambda parties: lambda raw: bytes(1_000_000), FrameError),
        # a word is signed for at once, and what is taken needs no more words
        (lambda parties: lambda raw: encode_receipt(None), FrameError),
        (lambda parties: lambda raw: encode_receipt(None) + b"later", FrameError),
    ],
)
def test_a_wrong_answer_ends_the_link_at_once_with_its_reason(parties, answer, error):
    wire = AnsweringWire(answer(parties))
    worker = parties.make("worker", wire=wire)

    worker.send_frame("owner", "activation", {})
    fault = worker.receive_item(5.0)

    assert isinstance(fault, LinkFault)
    assert type(fault.error) is error
    assert wire.num_calls == 1
    assert len(worker.receipts) == 0


def test_text_of_a_peer_cannot_steer_a_terminal(parties):
    message = "\x1b[2J" + "long " * 300
    worker = parties.make("worker", wire=AnsweringWire(lambda raw: encode_refusal(OrderError(message))))

    worker.send_frame("owner", "activation", {})
    text = str(worker.receive_item(5.0).error)

    assert text.isprintable()
    assert len(text) < 600


def test_one_lost_party_does_not_stop_the_others(parties):
    worker, mallory = parties.make("worker", SHORT), parties.make("mallory")

    worker.send_frame("owner", "activation", {})
    worker.send_frame("mallory", "activation", {})

    assert mallory.receive_item(5.0).sender == "worker"
    assert worker.receive_item(5.0).peer == "owner"


def test_a_sender_waits_for_room_and_gives_up_at_its_deadline(parties):
    worker = parties.make("worker", patient(0.5), wire=HeldWire())
    worker.send_frame("owner", "activation", {}, [bytes(900_000)])

    with pytest.raises(PeerLostError):
        worker.send_frame("owner", "activation", {}, [bytes(900_000)])


def test_an_eviction_wakes_a_sender_that_waits_for_room(parties):
    worker = parties.make("worker", patient(60.0), wire=HeldWire())
    worker.send_frame("owner", "activation", {}, [bytes(900_000)])
    threading.Timer(0.05, worker.evict_party, ["owner"]).start()

    with pytest.raises(PeerRefusedError, match="evicted"):
        worker.send_frame("owner", "activation", {}, [bytes(900_000)])
    assert worker.receive_item(0.0) is None


def test_a_control_frame_passes_a_full_queue(parties):
    worker = parties.make("worker", patient(60.0), wire=HeldWire())
    worker.send_frame("owner", "activation", {}, [bytes(1_000_000)])

    assert worker.send_frame("owner", "verdict", {}).fields.sequence == 1


def test_a_full_inbox_holds_back_the_receipt_until_there_is_room(parties):
    limits = TransportConfig(timeout_s=10.0, max_frame_bytes=2**20, max_queued_bytes=2**20)
    owner, worker = parties.make("owner", limits), parties.make("worker", limits)
    sent = [worker.send_frame("owner", "activation", {}, [bytes(600_000)]) for _ in range(2)]
    last = worker.send_frame("owner", "verdict", {})
    assert worker.receipts.wait_for_proof(sent[0].header_digest, 5.0)

    assert worker.receipts.wait_for_proof(last.header_digest, 0.1) is None
    owner.receive_item(5.0)

    assert worker.receipts.wait_for_proof(last.header_digest, 5.0)


def test_a_full_inbox_of_one_sender_lets_others_and_control_frames_pass(parties):
    limits = TransportConfig(timeout_s=0.1, max_frame_bytes=2**20, max_queued_bytes=2**20)
    owner = parties.make("owner", limits)
    payload = bytes(1_000_000)
    worker, mallory = parties.identities["worker"], parties.identities["mallory"]
    flood = frame_bytes(mallory, header_values(sender="mallory", payload=payload), payload)
    assert refusal(owner.answer_frame(flood, "mallory")) == ""
    place = {"sequence": 1, "previous": owner.receive_item(0.0).header.header_digest}
    second = frame_bytes(mallory, header_values(sender="mallory", payload=payload, **place), payload)
    assert refusal(owner.answer_frame(second, "mallory")) == ""
    place = {"sequence": 2, "previous": parse_digest(second)}
    third = frame_bytes(mallory, header_values(sender="mallory", payload=payload, **place), payload)

    assert refusal(owner.answer_frame(third, "mallory")) == "PeerLostError"
    assert refusal(owner.answer_frame(frame_bytes(mallory, header_values(sender="mallory", **place)), "mallory")) == ""
    assert refusal(owner.answer_frame(frame_bytes(worker, header_values(payload=payload), payload), "worker")) == ""


def parse_digest(raw):
    from phalanx.transport import parse_frame

    return parse_frame(raw, TransportConfig()).header.header_digest


def test_a_flood_of_control_frames_ends_at_twice_the_bound(parties):
    limits = TransportConfig(timeout_s=0.02, max_frame_bytes=2**16, max_queued_bytes=2**16)
    owner, mallory = parties.make("owner", limits), parties.identities["mallory"]
    answers, place = [], {}
    for number in range(200):
        raw = frame_bytes(mallory, header_values(sender="mallory", **place))
        answers.append(refusal(owner.answer_frame(raw, "mallory")))
        if answers[-1]:
            break
        place = {"sequence": number + 1, "previous": parse_digest(raw)}

    assert answers[-1] == "PeerLostError"
    assert 50 < len(answers) < 130


def test_a_retry_that_overtakes_its_first_try_is_delivered_once(parties):
    limits = TransportConfig(timeout_s=10.0, max_frame_bytes=2**20, max_queued_bytes=2**20)
    owner, worker = parties.make("owner", limits), parties.identities["worker"]
    payload = bytes(1_000_000)
    first = frame_bytes(worker, header_values(payload=payload), payload)
    owner.answer_frame(first, "worker")
    second = header_values(payload=payload, sequence=1, previous=parse_digest(first))
    raw = frame_bytes(worker, second, payload)
    answers = []
    tries = [threading.Thread(target=lambda: answers.append(owner.answer_frame(raw, "worker"))) for _ in range(2)]

    for attempt in tries:
        attempt.start()
    owner.receive_item(5.0)
    for attempt in tries:
        attempt.join(120.0)

    assert [refusal(answer) for answer in answers] == ["", ""]
    assert answers[0] == answers[1]
    assert owner.receive_item(5.0).header.fields.sequence == 1
    assert owner.receive_item(0.0) is None


class RefusingWire(HeldWire):
    """No process listens at the other end."""

    def deliver_frame(self, receiver, raw, timeout_s):
        raise PeerGoneError("connection refused")


def test_where_nobody_listens_any_more_a_party_is_lost_long_before_the_deadline(parties, monkeypatch):
    monkeypatch.setattr(outbox, "_GONE_S", 0.1)
    worker = parties.make("worker", patient(600.0), wire=RefusingWire())

    worker.send_frame("owner", "activation", {})
    fault = worker.receive_item(5.0)

    assert isinstance(fault.error, PeerLostError)
    assert "0.1 s" in str(fault.error)


def test_what_a_failed_link_had_not_delivered_can_be_had_once(parties):
    queued = threading.Event()

    def lose(raw):
        queued.wait()
        raise PeerLostError("answer lost")

    worker = parties.make("worker", SHORT, wire=AnsweringWire(lose))
    sent = [worker.send_frame("owner", "activation", {"n": n}, (b"ab" * n,)) for n in range(3)]
    queued.set()
    worker.receive_item(5.0)

    later = worker.put_aside("owner", "activation", {"n": 3})
    undelivered = worker.take_undelivered("owner")

    assert [(header, bytes(payload)) for header, payload in undelivered] == [
        (header, b"ab" * n) for n, header in enumerate(sent)
    ]
    assert later.fields.sequence == 3
    assert worker.take_undelivered("owner") == []


def test_nothing_is_put_aside_while_a_link_is_open(parties):
    worker = parties.make("worker")
    parties.make("owner")
    worker.send_frame("owner", "activation", {})

    with pytest.raises(PeerRefusedError, match="is open"):
        worker.put_aside("owner", "activation", {})


def test_what_was_for_an_evicted_party_is_gone(parties):
    worker = parties.make("worker", wire=HeldWire())
    worker.send_frame("owner", "activation", {})

    worker.evict_party("owner")

    assert worker.take_undelivered("owner") == []
    with pytest.raises(PeerRefusedError):
        worker.put_aside("owner", "activation", {})
