"""A party that comes back is another one: nothing of its earlier incarnation is taken, and its chains begin anew."""

import pytest

from phalanx.errors import CertificateError, PeerRefusedError, SignatureError
from phalanx.security.crypto import Identity, certified_name, check_session_name, incarnation_of, name_of_incarnation
from phalanx.transport import Endpoint, LinkFault, TransportConfig

LIMITS = TransportConfig(timeout_s=5.0)


class Recorder:
    """A wire that keeps what it carried."""

    def __init__(self, wire):
        self._wire, self.raw = wire, []

    def __getattr__(self, name):
        return getattr(self._wire, name)

    def deliver_frame(self, receiver, raw, timeout_s):
        self.raw.append(raw)
        return self._wire.deliver_frame(receiver, raw, timeout_s)


@pytest.fixture
def begin(parties):
    """Make the endpoint of the worker in one of its incarnations, on a wire that keeps what it carries."""
    opened = []

    def make(life):
        identity = parties.identities["worker"].with_session_name(name_of_incarnation("worker", life))
        wire = Recorder(parties.network.wire_for("worker"))
        endpoint = Endpoint(identity, {"owner": parties.peers["owner"]}, "run-1", wire, LIMITS)
        opened.append(endpoint)
        return endpoint, wire

    yield make
    for endpoint in opened:
        endpoint.close()


def texts(endpoint):
    """What was said to a party and has arrived: a sender waits until it has."""
    found = []
    while (item := endpoint.receive_item(0.0)) is not None:
        assert not isinstance(item, LinkFault), item
        found.append((item.sender, item.body["text"]))
    return found


def say(endpoint, text):
    endpoint.send_frame("owner", "word", {"text": text})
    endpoint.flush_frames(5.0)


def test_a_second_life_is_heard_after_the_first_was_shut_out(parties, begin):
    owner = parties.make("owner")
    first, _ = begin(1)
    say(first, "one")
    owner.evict_party("worker")
    second, _ = begin(2)
    owner.add_peer(second_peer := parties.peers["worker"].with_session_name("worker.2"))

    say(second, "two")
    owner.send_frame("worker.2", "word", {"text": "welcome"})
    owner.flush_frames(5.0)

    assert texts(owner) == [("worker", "one"), ("worker.2", "two")]
    assert texts(second) == [("owner", "welcome")]
    assert owner.known_peers["worker.2"] == second_peer != owner.known_peers["worker"]


def test_nothing_of_an_earlier_life_is_taken_any_more(parties, begin):
    owner = parties.make("owner")
    first, wire = begin(1)
    say(first, "one")
    owner.add_peer(parties.peers["worker"].with_session_name("worker.2"))

    # the same frame once more, and a new one of the process that lives on
    owner.answer_frame(wire.raw[0], "worker")
    assert isinstance(owner.last_refusal("worker"), PeerRefusedError)
    first.send_frame("owner", "word", {"text": "still here"})
    fault = first.receive_item(5.0)

    assert isinstance(fault, LinkFault)
    assert isinstance(fault.error, PeerRefusedError)
    assert texts(owner) == [("worker", "one")]
    assert owner.refusal_counts["worker"] == 2


def test_a_later_life_is_unknown_until_the_owner_says_so(parties, begin):
    owner = parties.make("owner")
    second, _ = begin(2)

    second.send_frame("owner", "word", {"text": "let me in"})

    assert isinstance(second.receive_item(5.0), LinkFault)
    assert texts(owner) == []


def test_whoever_is_shut_out_in_a_later_life_is_shut_out(parties, begin):
    owner = parties.make("owner")
    owner.add_peer(parties.peers["worker"].with_session_name("worker.2"))
    owner.evict_party("worker.2")
    second, _ = begin(2)

    second.send_frame("owner", "word", {"text": "let me in"})

    assert isinstance(second.receive_item(5.0), LinkFault)


def test_an_earlier_life_that_is_learnt_later_does_not_come_back_to_life(parties, begin):
    owner = parties.make("owner")
    for life in (3, 2):
        owner.add_peer(parties.peers["worker"].with_session_name(name_of_incarnation("worker", life)))
    third, _ = begin(3)

    say(third, "three")

    assert texts(owner) == [("worker.3", "three")]


def test_another_key_is_no_later_life(parties):
    owner = parties.make("owner")

    with pytest.raises(PeerRefusedError, match="another key"):
        owner.add_peer(Identity.without_certificate("worker").with_session_name("worker.2").public)


def test_a_header_of_one_life_proves_nothing_against_another(parties, begin):
    parties.make("owner")
    first, _ = begin(1)
    header = first.send_frame("owner", "word", {"text": "one"})

    header.verify_sender(parties.peers["worker"])
    with pytest.raises(SignatureError, match="checked against the key of"):
        header.verify_sender(parties.peers["worker"].with_session_name("worker.2"))


@pytest.mark.parametrize("name", ["worker", "worker.2", "worker.10", "a-1.999"])
def test_names_of_a_session(name):
    assert check_session_name(name) == name
    assert name_of_incarnation(certified_name(name), incarnation_of(name)) == name


@pytest.mark.parametrize("name", ["", ".2", "a.", "a.0", "a.1", "a.02", "a.2.3", "a.x", "a.2 ", "A", "A.2"])
def test_names_of_no_session(name):
    with pytest.raises(CertificateError, match="party name"):
        check_session_name(name)


def test_nobody_is_called_by_the_name_of_another_certificate(parties):
    for stranger in ("owner", "owner.2", "worker2"):
        with pytest.raises(CertificateError):
            parties.identities["worker"].with_session_name(stranger)
        with pytest.raises(CertificateError):
            parties.peers["worker"].with_session_name(stranger)
