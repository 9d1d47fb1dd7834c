import copy
import hashlib
import json
import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sealed_pair import CLIENT, CUT, SERVER, TERMS, CountingEpochs, other_terms, plain, shake_hands

from phalanx.config import canonical_json
from phalanx.errors import PhalanxError, RollbackError, SealError, SignatureError
from phalanx.security.crypto import HybridSealKey, Identity, in_domain
from phalanx.security.seal import HandshakeOffer, answer_hello, handshake
from phalanx.security.seal.header import SealRefusal


def offer(terms=TERMS, identity=CLIENT):
    return HandshakeOffer(terms, identity, CountingEpochs())


def answered(hello, terms=TERMS, identity=SERVER, client=CLIENT.public):
    return answer_hello(hello, terms, identity, CountingEpochs(), client)


def reason_of(action):
    with pytest.raises(SealError) as caught:
        action()
    return caught.value.reason


def signed_again(data, identity, **changes):
    """The same hello with other contents, signed by the party that changed them."""
    body = json.loads(data)["body"] | changes
    signature = identity.sign_data(in_domain("seal-hello/2", canonical_json(body)))
    return canonical_json({"body": body, "signature": signature.hex()})


def test_both_ends_have_the_same_keys_and_each_handshake_has_others():
    first, second = shake_hands(), shake_hands()

    for client, server in (first, second):
        assert server.receiver.open_tensor(client.sender.seal_tensor(CUT, 0, 0, plain()), CUT, 0, 0) == plain()
        assert client.receiver.open_tensor(server.sender.seal_tensor(CUT, 0, 0, plain()), CUT, 0, 0) == plain()
    assert first[0].context.session != second[0].context.session


def test_each_handshake_raises_the_epoch_of_both_sides():
    epochs = CountingEpochs(), CountingEpochs()

    found = [
        (end.sender.sender_epoch, end.receiver.sender_epoch) for _ in range(2) for end in shake_hands(TERMS, *epochs)
    ]

    assert found == [(1, 1), (1, 1), (2, 2), (2, 2)]


def test_where_shares_sessions_and_epochs_repeat_fresh_salts_still_give_other_keys(monkeypatch):
    fresh, private = secrets.token_bytes, HybridSealKey.generate()
    encapsulated = private.lattice.public_key().encapsulate()

    class Same:
        generate = staticmethod(lambda: private)

    class SameCurve:
        generate = staticmethod(lambda: private.curve)

    monkeypatch.setattr(handshake.secrets, "token_bytes", lambda size: bytes(16) if size == 16 else fresh(size))
    monkeypatch.setattr(handshake, "HybridSealKey", Same)
    monkeypatch.setattr(handshake, "X25519PrivateKey", SameCurve)
    monkeypatch.setattr(handshake, "_encapsulate", lambda key: encapsulated)
    first, second = shake_hands(), shake_hands()

    frame = first[0].sender.seal_tensor(CUT, 0, 0, plain())

    assert first[0].context == second[0].context
    assert reason_of(lambda: second[1].receiver.open_tensor(frame, CUT, 0, 0)) == SealRefusal.ALTERED
    assert first[1].receiver.open_tensor(frame, CUT, 0, 0) == plain()


def test_every_byte_of_a_hello_counts():
    hello = offer().hello

    for position in range(len(hello)):
        altered = bytearray(hello)
        altered[position] ^= 0x01
        with pytest.raises((SealError, SignatureError)):
            answered(bytes(altered))


def test_every_byte_of_a_reply_counts_and_the_right_one_is_still_accepted():
    mine = offer()
    reply, server = answered(mine.hello)

    for position in range(len(reply)):
        altered = bytearray(reply)
        altered[position] ^= 0x01
        with pytest.raises((SealError, SignatureError)):
            mine.accept_reply(bytes(altered), SERVER.public)

    client = mine.accept_reply(reply, SERVER.public)
    assert server.receiver.open_tensor(client.sender.seal_tensor(CUT, 0, 0, plain()), CUT, 0, 0) == plain()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": "run-2"}, SealRefusal.FOREIGN_RUN),
        ({"config_digest": b"\x12" * 32}, SealRefusal.FOREIGN_CONFIG),
        ({"attestation": b"\x23" * 32}, SealRefusal.FOREIGN_ATTESTATION),
        ({"server": "enclave-b"}, SealRefusal.FOREIGN_PARTY),
        ({"chunk_bytes": 64}, SealRefusal.FOREIGN_CHUNKING),
    ],
)
def test_a_side_that_means_something_else_is_refused_by_name(change, reason):
    assert reason_of(lambda: answered(offer(other_terms(**change)).hello)) == reason


def test_a_hello_for_another_client_is_refused():
    other = Identity.without_certificate("client-b")
    hello = signed_again(offer().hello, CLIENT, client="client-b")

    assert reason_of(lambda: answered(hello)) == SealRefusal.FOREIGN_PARTY
    assert reason_of(lambda: offer(identity=other)) == SealRefusal.FOREIGN_PARTY
    assert reason_of(lambda: answered(offer().hello, client=other.public)) == SealRefusal.FOREIGN_PARTY
    assert reason_of(lambda: answered(offer().hello, identity=other)) == SealRefusal.FOREIGN_PARTY
    assert reason_of(lambda: offer().accept_reply(b"", other.public)) == SealRefusal.FOREIGN_PARTY


def test_a_man_in_the_middle_with_a_key_of_his_own_is_refused_on_both_sides():
    impostor_client = Identity.without_certificate("client-a")
    impostor_server = Identity.without_certificate("enclave")
    mine = offer()

    with pytest.raises(SignatureError, match="client-a"):
        answered(offer(identity=impostor_client).hello)
    reply, _ = answered(mine.hello, identity=impostor_server)
    with pytest.raises(SignatureError, match="enclave"):
        mine.accept_reply(reply, SERVER.public)


def test_a_reply_to_another_hello_is_refused_and_the_right_one_accepted():
    first, second = offer(), offer()
    old, _ = answered(first.hello)
    new, _ = answered(second.hello)

    assert reason_of(lambda: second.accept_reply(old, SERVER.public)) == SealRefusal.STALE_REPLY
    # it does not help to repeat the session
    session = json.loads(second.hello)["body"]["session"]
    forged = signed_again(old, SERVER, session=session)
    assert reason_of(lambda: second.accept_reply(forged, SERVER.public)) == SealRefusal.STALE_REPLY

    second.accept_reply(new, SERVER.public)


def test_a_hello_is_no_reply_and_a_reply_is_no_hello():
    mine = offer()
    reply, _ = answered(mine.hello)

    assert reason_of(lambda: answered(signed_again(reply, CLIENT))) == SealRefusal.MALFORMED
    assert (
        reason_of(lambda: offer().accept_reply(signed_again(mine.hello, SERVER), SERVER.public))
        == SealRefusal.STALE_REPLY
    )


def test_an_offer_is_accepted_once():
    mine = offer()
    reply, _ = answered(mine.hello)
    mine.accept_reply(reply, SERVER.public)

    assert reason_of(lambda: mine.accept_reply(reply, SERVER.public)) == SealRefusal.CLOSED
    with pytest.raises(TypeError, match="never copied"):
        copy.copy(offer())


def test_a_hello_that_is_replayed_leads_to_a_channel_in_which_nothing_opens():
    mine = offer()
    reply, server = answered(mine.hello)
    client = mine.accept_reply(reply, SERVER.public)

    _, again = answered(mine.hello)

    frame = client.sender.seal_tensor(CUT, 0, 0, plain())
    assert reason_of(lambda: again.receiver.open_tensor(frame, CUT, 0, 0)) == SealRefusal.ALTERED
    assert server.receiver.open_tensor(frame, CUT, 0, 0) == plain()


def test_a_side_whose_machine_was_turned_back_is_known_by_its_epoch():
    mine = offer()
    reply, _ = answered(mine.hello)

    assert reason_of(lambda: mine.accept_reply(reply, SERVER.public, after_epoch=1)) == SealRefusal.STALE_EPOCH
    mine.accept_reply(reply, SERVER.public, after_epoch=0)

    epochs = CountingEpochs()
    replayed = lambda: answer_hello(mine.hello, TERMS, SERVER, epochs, CLIENT.public, after_epoch=1)  # noqa: E731
    assert reason_of(replayed) == SealRefusal.STALE_EPOCH
    assert epochs.notice_count == 0


def test_a_share_of_low_order_is_refused():
    for share in (bytes(32 + 1184), b"\x01" + bytes(31 + 1184)):
        hello = signed_again(offer().hello, CLIENT, share=share.hex())
        assert reason_of(lambda hello=hello: answered(hello)) == SealRefusal.MALFORMED


@pytest.mark.parametrize("place", [10, -10], ids=["curve", "lattice"])
def test_no_half_of_the_key_exchange_can_be_exchanged(place):
    mine = offer()
    reply, server = answered(mine.hello)
    share = bytearray.fromhex(json.loads(reply)["body"]["share"])
    share[place] ^= 1
    client = mine.accept_reply(signed_again(reply, SERVER, share=share.hex()), SERVER.public)

    frame = client.sender.seal_tensor(CUT, 0, 0, plain())

    # the transcript differs as well: this shows that such a reply gives no common keys, not which secret did it
    assert reason_of(lambda: server.receiver.open_tensor(frame, CUT, 0, 0)) == SealRefusal.ALTERED


def test_the_keys_need_both_secrets(monkeypatch):
    lattice = handshake._encapsulate
    monkeypatch.setattr(handshake, "_encapsulate", lambda key: (bytes(32), lattice(key)[1]))
    client, server = shake_hands()
    frame = client.sender.seal_tensor(CUT, 0, 0, plain())

    assert reason_of(lambda: server.receiver.open_tensor(frame, CUT, 0, 0)) == SealRefusal.ALTERED


def test_a_hello_of_one_half_is_refused():
    for share in ("07" * 32, "07" * (32 + 1088), "07" * 1184):
        assert (
            reason_of(lambda share=share: answered(signed_again(offer().hello, CLIENT, share=share)))
            == SealRefusal.MALFORMED
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": 0},
        {"epoch": 2**32},
        {"epoch": "1"},
        {"epoch": True},
        {"salt": "00"},
        {"salt": "zz" * 32},
        {"session": ""},
        {"reply_to": "00"},
        {"share": 5},
        {"more": 1},
    ],
)
def test_a_signed_hello_with_odd_contents_is_refused(changes):
    assert reason_of(lambda: answered(signed_again(offer().hello, CLIENT, **changes))) == SealRefusal.MALFORMED


def test_a_hello_of_another_version_is_refused():
    hello = signed_again(offer().hello, CLIENT, version=1)

    assert reason_of(lambda: answered(hello)) == SealRefusal.OTHER_VERSION


@given(st.binary(max_size=300) | st.sampled_from([b"{}", b'{"body":{},"signature":""}', b"x" * 9000]))
def test_what_is_no_hello_is_refused(data):
    assert reason_of(lambda: answered(data)) == SealRefusal.MALFORMED
    assert reason_of(lambda: offer().accept_reply(data, SERVER.public)) == SealRefusal.MALFORMED


def test_a_hello_that_is_too_long_is_not_even_parsed():
    with pytest.raises(SealError, match="at most 8192"):
        answered(b'{"body":"' + b"x" * 9000 + b'"}')


def test_no_epoch_is_spent_on_a_hello_that_is_refused():
    epochs = CountingEpochs()

    with pytest.raises(PhalanxError):
        answer_hello(b"junk", TERMS, SERVER, epochs, CLIENT.public)

    assert epochs.notice_count == 0


def test_without_a_fresh_epoch_there_is_no_handshake():
    class Stuck:
        def raise_epoch(self):
            raise RollbackError("stuck")

    with pytest.raises(RollbackError):
        HandshakeOffer(TERMS, CLIENT, Stuck())
    with pytest.raises(RollbackError):
        answer_hello(offer().hello, TERMS, SERVER, Stuck(), CLIENT.public)


def test_a_hello_holds_no_secret():
    mine = offer()

    for private in (mine._private.curve.private_bytes_raw(), mine._private.lattice.private_bytes_raw()):
        assert private.hex().encode() not in mine.hello
        assert hashlib.sha256(private).hexdigest().encode() not in mine.hello
