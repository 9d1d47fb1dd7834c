"""What security costs: counted apart, and nothing of it twice."""

import itertools

import pytest
import torch
from split_house import House
from split_scene import HIDDEN, SEQ

from phalanx.errors import TranscriptError
from phalanx.security.crypto import Identity, digest_hex
from phalanx.security.seal import HandshakeOffer, Terms, answer_hello, compare_statements, read_statement
from phalanx.split import TensorKinds
from phalanx.split.channel import link as link_module
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.link import PlainLink, SealedLink
from phalanx.split.training.task import NextToken
from phalanx.testing.split import MemoryEpochs
from phalanx.transport import endpoint as endpoint_module
from phalanx.transport import frame as frame_module

KIND = TensorKinds(1, SEQ, HIDDEN, "fp32", NextToken().label_shape).cut_kind("train", 1)
HIDDEN_STATES = torch.arange(SEQ * HIDDEN, dtype=torch.float32).reshape(1, SEQ, HIDDEN)


def two_ends():
    """A client's link, the enclave's, and their identities."""
    client, enclave = Identity.without_certificate("client-0"), Identity.without_certificate("enclave")
    terms = Terms("run", b"\1" * 32, b"\2" * 32, client.name, enclave.name, 64)
    offer = HandshakeOffer(terms, client, MemoryEpochs())
    reply, far = answer_hello(offer.hello, terms, enclave, MemoryEpochs(), client.public)
    near = offer.accept_reply(reply, enclave.public)
    return SealedLink(near, client), SealedLink(far, enclave), client.public, enclave.public


def compare(near, far, client, enclave):
    compare_statements(read_statement(near.signed_statement(), client), read_statement(far.signed_statement(), enclave))


def test_a_packed_frame_brings_its_digest_and_the_other_end_may_be_given_it():
    near, far, *who = two_ends()

    frame = near.pack_tensor(KIND, 0, 0, HIDDEN_STATES)
    opened = far.unpack_tensor(frame, KIND, 0, 0, frame.digest)

    assert frame.digest == digest_hex(memoryview(frame))
    assert torch.equal(opened, HIDDEN_STATES)
    compare(near, far, *who)
    assert near.link_costs.digest_s > 0
    assert far.link_costs.digest_s == 0.0


def test_an_end_that_notes_another_digest_than_was_sent_is_found_by_its_transcript():
    near, far, *who = two_ends()

    far.unpack_tensor(near.pack_tensor(KIND, 0, 0, HIDDEN_STATES), KIND, 0, 0, digest_hex(b"another frame"))

    with pytest.raises(TranscriptError, match="not the same ones"):
        compare(near, far, *who)


def test_the_cipher_is_counted_apart_from_the_rest_of_the_link():
    near, far, *_ = two_ends()

    for microbatch in range(50):
        far.unpack_tensor(near.pack_tensor(KIND, 0, microbatch, HIDDEN_STATES), KIND, 0, microbatch)

    for costs in (near.link_costs, far.link_costs):
        assert costs.cipher_s > 0
        assert costs.framing_s > 0
        assert costs.link_s == pytest.approx(costs.cipher_s + costs.digest_s + costs.framing_s)
    assert PlainLink().link_costs == Costs()


def test_the_clock_is_read_twice_for_each_chunk_and_never_without_being_asked():
    terms = Terms("run", b"\1" * 32, b"\2" * 32, "client-0", "enclave", KIND.size_bytes // 4)
    client, enclave = (Identity.without_certificate(name) for name in ("client-0", "enclave"))
    offer = HandshakeOffer(terms, client, MemoryEpochs())
    reply, far = answer_hello(offer.hello, terms, enclave, MemoryEpochs(), client.public)
    near = offer.accept_reply(reply, enclave.public)
    ticks = itertools.count()

    far.receiver.open_tensor(near.sender.seal_tensor(KIND, 0, 0, bytes(KIND.size_bytes)), KIND, 0, 0)
    near.time_ciphers(lambda: float(next(ticks)))
    near.sender.seal_tensor(KIND, 0, 1, bytes(KIND.size_bytes))

    assert (near.cipher_seconds, far.cipher_seconds) == (4.0, 0.0)
    assert next(ticks) == 8


def test_each_frame_is_digested_once_at_each_end_of_a_session(source, tmp_path, monkeypatch):
    digested = []

    def counting(*buffers):
        digested.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        return digest_hex(*buffers)

    house = House(source, tmp_path, clients=1)
    with house.open() as session:
        session.train_turn(0)
        for module in (link_module, endpoint_module, frame_module):
            monkeypatch.setattr(module, "digest_hex", counting)
        session.train_turn(1)
        size = session.lead.enclave_peers[1].tensor_link._channel.sender.frame_size(KIND)

    # four microbatches: made by the client's link, checked by the enclave's transport
    assert digested.count(size) == 2 * 4


def test_a_step_tells_what_both_ends_spent(source, tmp_path):
    with House(source, tmp_path).open() as session:
        before = session.lead.process_costs
        session.train_turn(0)
        spent = session.lead.process_costs.subtract_costs(before)

    assert before.meeting_s > 0
    assert min(spent) >= 0
    assert spent.cipher_s > 0
    assert spent.signing_s > 0
    assert spent.link_s + spent.signing_s < spent.cpu_s
