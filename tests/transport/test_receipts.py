from dataclasses import replace

import pytest

from phalanx.errors import OrderError, SignatureError
from phalanx.transport.link import RECEIPT_EVERY, encode_receipt


def send_all(parties, number, payload=b"x"):
    owner, worker = parties.make("owner"), parties.make("worker")
    headers = [owner.send_frame("worker", "activation", {"n": n}, [payload] if payload else []) for n in range(number)]
    owner.flush_frames(5.0)
    return owner, worker, headers


def test_a_word_has_its_receipt_at_once(parties):
    owner, _, headers = send_all(parties, 3, payload=b"")

    assert [owner.receipts.get_proof(header.header_digest).chain for header in headers] == [
        (header,) for header in headers
    ]


def test_a_tensor_is_spoken_for_by_the_receipt_of_the_next_word(parties):
    owner, _, headers = send_all(parties, 4)
    assert [owner.receipts.get_proof(header.header_digest) is None for header in headers] == [False, True, True, True]

    word = owner.send_frame("worker", "commit", {})
    proof = owner.receipts.wait_for_proof(word.header_digest, 5.0) and owner.receipts.get_proof(
        headers[1].header_digest
    )

    assert proof.receipt.header_digest == word.header_digest
    assert proof.chain == (*headers[1:], word)
    proof.verify_arrival(parties.peers["worker"])


def test_tensors_alone_are_signed_for_every_so_often(parties):
    owner, _, headers = send_all(parties, 2 * RECEIPT_EVERY + 1)

    proofs = [owner.receipts.get_proof(header.header_digest) for header in headers]
    for proof in proofs:
        proof.verify_arrival(parties.peers["worker"])
    signed = [headers[n * RECEIPT_EVERY].header_digest for n in range(3)]
    assert [proof.receipt.header_digest for proof in proofs] == [
        signed[0],
        *[signed[1]] * RECEIPT_EVERY,
        *[signed[2]] * RECEIPT_EVERY,
    ]


def test_a_proof_of_another_frame_or_receiver_is_none(parties):
    owner, _, headers = send_all(parties, RECEIPT_EVERY + 1)
    proof = owner.receipts.get_proof(headers[1].header_digest)

    with pytest.raises(SignatureError):
        proof.verify_arrival(parties.peers["mallory"])
    for chain in ((), proof.chain[:-1], proof.chain[1:-1], (headers[0], *proof.chain[1:]), proof.chain[::-1]):
        with pytest.raises(OrderError, match="do not lead up"):
            replace(proof, chain=chain).verify_arrival(parties.peers["worker"])


def test_who_never_signs_for_tensors_is_given_no_more_of_them(parties):
    owner = parties.make("owner")
    parties.network.handles["worker"] = lambda raw, sender: encode_receipt(None)

    owner.send_frame("worker", "activation", {}, [b"x"])

    assert "one is due" in str(owner.receive_item(5.0).error)


def test_a_repeated_tensor_is_taken_once_and_answered_as_before(parties):
    owner, worker, headers = send_all(parties, 2)
    raws = []
    handle = parties.network.handles["worker"]

    def keep(raw, sender):
        raws.append(raw)
        return handle(raw, sender)

    parties.network.handles["worker"] = keep
    owner.send_frame("worker", "activation", {"n": 2}, [b"x"])
    owner.flush_frames(5.0)

    assert worker.answer_frame(raws[0], "owner") == encode_receipt(None)
    assert [worker.receive_item(1.0).body["n"] for _ in range(3)] == [0, 1, 2]
    assert worker.receive_item(0.0) is None
    assert len(headers) == 2
