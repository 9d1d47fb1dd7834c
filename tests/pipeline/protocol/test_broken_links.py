"""Links between workers that fail in the middle of a run: the owner relays what they had to carry, and none is lost."""

import pytest

from phalanx.errors import FrameError, PeerGoneError, PeerRefusedError, SignatureError
from phalanx.pipeline import PipelineConfig
from phalanx.pipeline.evidence.explain import explain_evidence
from phalanx.pipeline.protocol.greetings import Leave
from phalanx.pipeline.protocol.mailbox import LinkRelay
from phalanx.pipeline.protocol.messages import Apply, Carry
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.security.crypto import Identity
from phalanx.testing import Actor, OutgoingMessage, tampering, tiny_run
from phalanx.testing.endpoint import MemoryNetwork, MemoryWire
from phalanx.transport import CheckedFrame, Endpoint, TransportConfig, outbox

LIMITS = TransportConfig(timeout_s=60.0)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Links that fail soon; workers that hear nothing for a while do not look for their owner so soon."""
    monkeypatch.setattr(outbox, "_GONE_S", 0.2)


@pytest.fixture
def cut(monkeypatch):
    """Links that deliver nothing, by sender and receiver, and the error that their senders see."""
    links = {}
    deliver = MemoryWire.deliver_frame

    def deliver_or_not(self, receiver, raw, timeout_s):
        error = links.get((self._name, receiver))
        if error is not None:
            raise error
        return deliver(self, receiver, raw, timeout_s)

    monkeypatch.setattr(MemoryWire, "deliver_frame", deliver_or_not)
    return links


def patient_run():
    pipeline = PipelineConfig(stages=4, step_timeout_s=30.0, patience_s=10.0, transport=LIMITS)
    return tiny_run(pipeline=pipeline)


FORWARD, BACKWARD = ("worker-1", "worker-2"), ("worker-2", "worker-1")
CUT, REFUSED = PeerGoneError("cut"), PeerRefusedError("I do not know you")


@pytest.mark.quick_cases("forward-cut")
@pytest.mark.parametrize(
    ("links", "error"),
    [
        pytest.param([FORWARD], CUT, id="forward-cut"),
        pytest.param([BACKWARD], REFUSED, id="backward-refused"),
        pytest.param([FORWARD], REFUSED, id="forward-refused", marks=pytest.mark.slow),
        pytest.param([BACKWARD], CUT, id="backward-cut", marks=pytest.mark.slow),
        pytest.param([FORWARD, BACKWARD], CUT, id="both-cut", marks=pytest.mark.slow),
        pytest.param([FORWARD, BACKWARD], REFUSED, id="both-refused", marks=pytest.mark.slow),
    ],
)
def test_the_owner_carries_what_a_failed_link_had_to(make_company, honest_digest, cut, links, error):
    run = patient_run()
    company = make_company(run)
    company.run(1)
    cut.update(dict.fromkeys(links, error))

    company.run(2)

    assert (company.lost, company.verdicts) == ([], [])
    assert {(body["party"], body["about"]) for body in company.event_bodies("fault")} >= set(links)
    assert company.weights_digest() == honest_digest(run, 3)


def test_frames_whose_answers_were_lost_come_twice_and_blame_nobody(make_company, honest_digest, monkeypatch):
    run = patient_run()
    company = make_company(run)
    company.run(1)
    deliver = MemoryWire.deliver_frame

    def lose_the_answer(self, receiver, raw, timeout_s):
        answer = deliver(self, receiver, raw, timeout_s)
        if (self._name, receiver) == ("worker-1", "worker-2"):
            raise PeerGoneError("the answer was lost")
        return answer

    monkeypatch.setattr(MemoryWire, "deliver_frame", lose_the_answer)
    company.run(2)

    assert (company.lost, company.verdicts) == ([], [])
    assert company.weights_digest() == honest_digest(run, 3)


def test_a_worker_that_the_owner_cannot_reach_is_replaced_and_the_run_goes_on(make_company, honest_digest, cut):
    run = patient_run()
    company = make_company(run)
    company.run(1)
    cut["owner", "worker-1"] = PeerGoneError("cut")

    company.run(2)

    assert (company.lost, company.verdicts) == (["worker-1"], [])
    assert company.weights_digest() == honest_digest(run, 3)


@pytest.mark.slow
def test_a_lie_that_was_carried_convicts_its_author(make_company, honest_digest, cut):
    run = patient_run()
    lies = tampering(lambda direction, step, microbatch, tensor: -tensor if step == 1 else tensor)
    company = make_company(run, {1: Actor(lies)})
    cut["worker-1", "worker-2"] = PeerGoneError("cut")

    company.run(2)

    assert (company.evicted, company.lost) == (["worker-1"], [])
    assert company.weights_digest() == honest_digest(run, 2)


class Raw:
    """A body as it goes over the wire."""

    def __init__(self, kind, body):
        self.kind, self.body = kind, body

    def model_dump(self, mode):
        return self.body


@pytest.mark.quick_cases("step")
@pytest.mark.parametrize("field", ["microbatch", "step"])
def test_an_impossible_value_that_the_owner_was_to_carry_convicts_its_author(make_company, honest_digest, cut, field):
    def rewrite(outgoing):
        message = outgoing.message
        if message.kind != "tensor" or message.step != 0 or outgoing.receiver != "worker-2":
            return [outgoing]
        body = message.model_dump(mode="json") | {field: -1}
        return [OutgoingMessage(outgoing.receiver, Raw("tensor", body), outgoing.payload)]

    run = patient_run()
    company = make_company(run, {1: Actor(rewrite=rewrite)})
    cut["worker-1", "worker-2"] = PeerGoneError("cut")

    company.run(2)

    assert (company.evicted, company.lost) == (["worker-1"], [])
    assert company.weights_digest() == honest_digest(run, 2)
    (verdict,) = company.verdicts
    facts = explain_evidence(company.run_dir / verdict.evidence)
    assert facts["conclusion"].startswith("holds: worker-1 signed an impossible value")


@pytest.fixture
def three():
    """Endpoints of an owner and two workers that know each other, and what one of them has signed for another."""
    network, run = MemoryNetwork(), "run-1"
    identities = {name: Identity.without_certificate(name) for name in ("owner", "alice", "bob")}
    peers = {name: identity.public for name, identity in identities.items()}
    ends = {name: Endpoint(identities[name], peers, run, network.wire_for(name), LIMITS) for name in identities}
    yield ends
    for end in ends.values():
        end.close()


LEAVE = Leave(epoch=0)
APPLY = Apply(epoch=0, step=0, clip_coefficient=1.0)


def frame(sender, receiver, payload=b"tensor", message=LEAVE):
    """A frame of one endpoint for another, as the owner gets it to carry."""
    header = sender.send_frame(receiver.party_name, message.kind, message.model_dump(mode="json"), (payload,))
    return Carry(epoch=0, header=to_signed(header))


def from_whom(name, payload=b"tensor"):
    return CheckedFrame(name, Carry.kind, {}, memoryview(payload), None)


def test_a_carried_frame_is_its_senders(three):
    carry = frame(three["alice"], three["bob"])

    inner, message = LinkRelay(three["bob"]).unwrap_frame(from_whom("owner"), carry)

    assert (inner.sender, bytes(inner.payload), message) == ("alice", b"tensor", LEAVE)


@pytest.mark.parametrize(
    ("bringer", "receiver", "payload", "error"),
    [
        ("alice", "bob", b"tensor", FrameError),
        ("owner", "alice", b"tensor", FrameError),
        ("owner", "bob", b"tensOr", FrameError),
    ],
    ids=["not by the owner", "not for here", "altered"],
)
def test_a_carried_frame_that_is_not_in_order_is_refused(three, bringer, receiver, payload, error):
    carry = frame(three["alice"], three["bob"])

    with pytest.raises(error):
        LinkRelay(three[receiver]).unwrap_frame(from_whom(bringer, payload), carry)


def test_a_carried_frame_with_a_forged_signature_is_refused(three):
    carry = frame(three["alice"], three["bob"])
    forged = carry.model_copy(update={"header": carry.header.model_copy(update={"signature": "00" * 64})})

    with pytest.raises(SignatureError):
        LinkRelay(three["bob"]).unwrap_frame(from_whom("owner"), forged)


def test_the_owner_carries_nobody_elses_frames(three):
    order = frame(three["owner"], three["bob"], b"", APPLY)

    with pytest.raises(FrameError, match="from owner to bob, expected from alice"):
        LinkRelay(three["owner"]).forward_frame(from_whom("alice", b""), order)


def test_an_order_of_the_owner_to_another_cannot_be_brought_as_ones_own(three):
    """What alice signs as alice stays alice's, whichever party brings it."""
    order = frame(three["alice"], three["bob"], b"", APPLY)

    inner, _ = LinkRelay(three["bob"]).unwrap_frame(from_whom("owner", b""), order)

    assert inner.sender == "alice"
