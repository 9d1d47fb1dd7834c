from concurrent.futures import ThreadPoolExecutor

import pytest
from made_frames import frame_bytes, header_values, refusal

from phalanx.errors import FrameError, PeerLostError, PeerRefusedError
from phalanx.security.crypto import Identity, digest_hex
from phalanx.transport import LinkFault, TransportConfig
from phalanx.transport.frame import MAX_SHOWN_HEADER_BYTES


def test_a_frame_arrives_with_body_payload_and_evidence(parties):
    owner, worker = parties.make("owner"), parties.make("worker")

    sent = worker.send_frame("owner", "activation", {"step": 3}, [b"ab", memoryview(b"cdef")[1:]])
    received = owner.receive_item(5.0)

    assert (received.sender, received.kind, received.body) == ("worker", "activation", {"step": 3})
    assert received.payload == b"abdef"
    assert received.header.header_digest == sent.header_digest
    received.header.verify_sender(parties.peers["worker"])


def test_the_sender_keeps_a_receipt_that_the_receiver_signed(parties):
    owner, worker = parties.make("owner"), parties.make("worker")

    sent = owner.send_frame("worker", "activation", {}, [b"x"])
    proof = owner.receipts.wait_for_proof(sent.header_digest, 5.0)

    proof.verify_arrival(parties.peers["worker"])
    assert proof.receipt.header_digest == sent.header_digest
    assert owner.receipts.get_proof("0" * 64) is None
    assert worker.receive_item(5.0).kind == "activation"


def test_receipts_are_forgotten_up_to_a_number_and_link_only(parties):
    owner, _, _ = parties.make("owner"), parties.make("worker"), parties.make("mallory")
    to_worker = [owner.send_frame("worker", "activation", {}) for _ in range(5)]
    to_mallory = owner.send_frame("mallory", "activation", {})
    owner.flush_frames(5.0)

    owner.receipts.forget_before("worker", 3)

    assert [owner.receipts.get_proof(header.header_digest) is None for header in to_worker] == [True] * 3 + [False] * 2
    assert owner.receipts.get_proof(to_mallory.header_digest) is not None
    assert len(owner.receipts) == 3


def test_many_frames_both_ways_arrive_once_and_in_order(parties):
    owner, worker = parties.make("owner"), parties.make("worker")
    for number in range(100):
        owner.send_frame("worker", "activation", {"n": number})
        worker.send_frame("owner", "gradient", {"n": number})

    assert [worker.receive_item(5.0).body["n"] for _ in range(100)] == list(range(100))
    assert [owner.receive_item(5.0).body["n"] for _ in range(100)] == list(range(100))
    assert owner.receive_item(0.0) is None


def test_bytes_and_seconds_are_counted(parties):
    owner, worker = parties.make("owner"), parties.make("worker")
    worker.send_frame("owner", "activation", {}, [bytes(1_000_000)])
    worker.flush_frames(5.0)

    assert worker.bytes_sent["owner"] == owner.bytes_received["worker"] > 1_000_000
    assert owner.seconds_hashing > 0.0
    assert worker.seconds_hashing > 0.0
    assert owner.seconds_signing > 0.0
    assert worker.seconds_signing > 0.0


@pytest.mark.parametrize(
    ("changes", "tls_peer", "error"),
    [
        ({"sender": "worker"}, "mallory", "PeerRefusedError"),
        ({"sender": "stranger"}, "stranger", "PeerRefusedError"),
        ({"receiver": "worker"}, "worker", "PeerRefusedError"),
        ({"run": "run-2"}, "worker", "PeerRefusedError"),
        ({"sequence": 1}, "worker", "OrderError"),
        ({"previous": "0" * 64}, "worker", "OrderError"),
        ({"payload_digest": "0" * 64}, "worker", "FrameError"),
        ({"payload_size": 1}, "worker", "FrameError"),
    ],
)
def test_a_frame_with_one_thing_wrong_is_refused_and_the_good_one_passes(parties, changes, tls_peer, error):
    owner = parties.make("owner")
    worker = parties.identities["worker"]

    answer = owner.answer_frame(frame_bytes(worker, header_values(**changes)), tls_peer)

    assert refusal(answer) == error
    assert owner.refusal_counts[tls_peer] == 1
    assert type(owner.last_refusal(tls_peer)).__name__ == error
    assert owner.receive_item(0.0) is None
    assert refusal(owner.answer_frame(frame_bytes(worker, header_values()), "worker")) == ""
    assert owner.receive_item(0.0).sender == "worker"


def test_a_sender_cannot_sign_for_another_party(parties):
    owner = parties.make("owner")
    forged = frame_bytes(parties.identities["mallory"], header_values(sender="worker"))

    assert refusal(owner.answer_frame(forged, "worker")) == "SignatureError"
    assert refusal(owner.answer_frame(forged, "mallory")) == "PeerRefusedError"


@pytest.mark.parametrize("position", [20, 60, 200, 300])
def test_an_altered_header_is_refused(parties, position):
    owner = parties.make("owner")
    raw = bytearray(frame_bytes(parties.identities["worker"], header_values()))
    raw[position] ^= 1

    assert refusal(owner.answer_frame(bytes(raw), "worker")) in {"FrameError", "SignatureError", "PeerRefusedError"}


def test_an_altered_payload_is_refused_and_the_honest_one_passes_afterwards(parties):
    owner = parties.make("owner")
    raw = frame_bytes(parties.identities["worker"], header_values(payload=b"abc"), b"abc")

    assert refusal(owner.answer_frame(raw[:-1] + b"d", "worker")) == "FrameError"
    assert refusal(owner.answer_frame(raw, "worker")) == ""


def test_a_repeated_frame_gets_its_receipt_again_and_is_delivered_once(parties):
    owner = parties.make("owner")
    raw = frame_bytes(parties.identities["worker"], header_values())

    first, second = owner.answer_frame(raw, "worker"), owner.answer_frame(raw, "worker")

    assert first == second
    assert refusal(second) == ""
    assert owner.receive_item(0.0) is not None
    assert owner.receive_item(0.0) is None


def test_an_older_frame_is_a_replay(parties):
    owner, worker = parties.make("owner"), parties.identities["worker"]
    first = frame_bytes(worker, header_values())
    owner.answer_frame(first, "worker")
    previous = owner.receive_item(0.0).header.header_digest
    owner.answer_frame(frame_bytes(worker, header_values(sequence=1, previous=previous)), "worker")

    assert refusal(owner.answer_frame(first, "worker")) == "OrderError"


def test_an_evicted_party_is_refused_and_nothing_goes_to_it(parties):
    owner, worker = parties.make("owner"), parties.make("worker")
    worker.send_frame("owner", "activation", {"n": 0})
    worker.flush_frames(5.0)

    owner.evict_party("worker")
    worker.send_frame("owner", "activation", {"n": 1})
    fault = worker.receive_item(5.0)

    assert isinstance(fault, LinkFault)
    assert isinstance(fault.error, PeerRefusedError)
    assert fault.peer == "owner"
    with pytest.raises(PeerRefusedError):
        owner.send_frame("worker", "activation", {})
    assert owner.receive_item(0.0).body == {"n": 0}
    assert owner.receive_item(0.0) is None


def test_an_evicted_party_stays_evicted_when_it_is_added_again(parties):
    owner = parties.make("owner")
    owner.evict_party("worker")

    owner.add_peer(parties.peers["worker"])

    raw = frame_bytes(parties.identities["worker"], header_values())
    assert refusal(owner.answer_frame(raw, "worker")) == "PeerRefusedError"


def test_a_party_never_changes_its_key(parties):
    owner = parties.make("owner")

    with pytest.raises(PeerRefusedError, match="another key"):
        owner.add_peer(Identity.without_certificate("worker").public)
    with pytest.raises(PeerRefusedError, match="another key"):
        owner.add_peer(Identity.without_certificate("owner").public)


def test_a_party_that_joins_later_is_heard_from_then_on(parties):
    owner, spare = parties.make("owner"), Identity.without_certificate("spare")
    raw = frame_bytes(spare, header_values(sender="spare"))

    assert refusal(owner.answer_frame(raw, "spare")) == "PeerRefusedError"
    owner.add_peer(spare.public)

    assert refusal(owner.answer_frame(raw, "spare")) == ""


def test_nothing_is_sent_to_strangers_or_to_oneself(parties):
    owner = parties.make("owner")

    for receiver in ("stranger", "owner", "../x"):
        with pytest.raises(PeerRefusedError):
            owner.send_frame(receiver, "activation", {})


def test_a_frame_that_cannot_be_sent_leaves_the_link_whole(parties):
    owner, worker = parties.make("owner"), parties.make("worker", TransportConfig(max_frame_bytes=100_000))

    with pytest.raises(FrameError, match="max_frame_bytes"):
        worker.send_frame("owner", "activation", {}, [bytes(100_000)])
    with pytest.raises(FrameError, match="JSON"):
        worker.send_frame("owner", "activation", {"x": b"bytes"})
    worker.send_frame("owner", "activation", {}, [bytes(99_000)])

    assert owner.receive_item(5.0).payload.nbytes == 99_000


def test_a_frame_over_the_receivers_limit_breaks_the_link_with_our_error(parties):
    parties.make("owner", TransportConfig(max_frame_bytes=4096))
    worker = parties.make("worker")

    worker.send_frame("owner", "activation", {}, [bytes(5000)])
    fault = worker.receive_item(5.0)

    assert isinstance(fault.error, FrameError)


def test_a_closed_endpoint_sends_nothing_and_wakes_who_waits(parties):
    owner = parties.make("owner")
    owner.close()
    owner.close()

    with pytest.raises(PeerLostError, match="closed"):
        owner.receive_item(60.0)
    with pytest.raises(PeerRefusedError):
        owner.send_frame("worker", "activation", {})


def test_buffers_may_change_once_send_has_returned(parties):
    owner, worker = parties.make("owner"), parties.make("worker")
    buffer = bytearray(b"before")

    worker.send_frame("owner", "activation", {}, [memoryview(buffer)])
    buffer[:] = b"after!"

    assert owner.receive_item(5.0).payload == b"before"


def test_a_payload_may_come_with_its_digest_and_with_a_wrong_one_it_is_refused(parties):
    owner, worker = parties.make("owner"), parties.make("worker")

    owner.send_hashed("worker", "job", {}, memoryview(b"payload"), digest_hex(b"payload"))
    taken = worker.receive_item(5.0)
    owner.send_hashed("worker", "job", {}, memoryview(b"payload"), digest_hex(b"another"))
    fault = owner.receive_item(5.0)

    assert bytes(taken.payload) == b"payload"
    assert isinstance(fault, LinkFault)
    assert worker.refusal_counts["owner"] == 1
    with pytest.raises(FrameError, match="payload_digest"):
        worker.send_hashed("owner", "job", {}, memoryview(b"payload"), "no digest")


def test_a_party_that_waits_in_vain_can_be_told_from_one_that_does_not(parties):
    owner, worker = parties.make("owner"), parties.make("worker")
    assert owner.waiting_call is None

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(owner.receive_item, 60.0)
        while (first := owner.waiting_call) is None:
            assert not waiting.done()
        assert owner.waiting_call == first
        worker.send_frame("owner", "activation", {})
        assert waiting.result(60.0).kind == "activation"

    assert owner.waiting_call is None


def test_frames_that_nobody_has_taken_are_under_way(parties):
    worker = parties.make("worker")
    assert worker.sending_to == frozenset()

    worker.send_frame("owner", "activation", {})
    assert worker.sending_to == {"owner"}
    parties.make("owner")
    worker.flush_frames(5.0)

    assert worker.sending_to == frozenset()


def test_a_header_that_could_not_be_shown_to_the_judge_is_taken_from_the_judge_alone(parties):
    """Attacker: a party with nonsense so long that the complaint about it could not be sent."""
    owner, worker, mallory = parties.make("owner"), parties.make("worker"), parties.make("mallory")
    worker.allowances.show_headers_to("owner")
    words = {"words": "x" * MAX_SHOWN_HEADER_BYTES}

    owner.send_frame("worker", "assign", words)
    mallory.send_frame("worker", "bulk", {"words": ""})
    assert {worker.receive_item(5.0).sender for _ in range(2)} == {"owner", "mallory"}
    mallory.send_frame("worker", "bulk", words)

    fault = mallory.receive_item(5.0)
    assert isinstance(fault, LinkFault)
    assert "cannot be shown to owner" in str(fault.error)
    assert worker.receive_item(0.0) is None


def test_a_header_that_is_taken_can_be_shown_whatever_is_in_it(parties):
    owner, worker, mallory = parties.make("owner"), parties.make("worker"), parties.make("mallory")
    worker.allowances.show_headers_to("owner")
    # the worst for JSON within JSON: each of these characters takes two, and then four
    mallory.send_frame("worker", "bulk", {"words": '"' * (MAX_SHOWN_HEADER_BYTES // 2 - 1024)})
    received = worker.receive_item(5.0)

    worker.send_frame("owner", "fault", {"evidence": received.header.header_bytes.decode()})

    assert owner.receive_item(5.0).body["evidence"] == received.header.header_bytes.decode()
