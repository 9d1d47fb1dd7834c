"""A hello: what both ends mean, signed; another run, party, version or form is refused by its name."""

import json

import pytest
from sealed_pair import CLIENT, SERVER, TERMS, other_terms

from phalanx.config import canonical_json
from phalanx.errors import SealError, SignatureError
from phalanx.security.crypto import in_domain
from phalanx.security.seal.direction import MAX_EPOCH
from phalanx.security.seal.header import SealRefusal
from phalanx.security.seal.hello import MAX_HELLO_BYTES, HandshakeHello, read_hello

HELLO = HandshakeHello(TERMS, b"\x01" * 16, 1, b"\x02" * 32, b"\x03" * 1216)


def altered(**changes) -> bytes:
    """The hello with other contents, signed by the client; None takes a key out."""
    body = json.loads(HELLO.sign_hello(CLIENT))["body"] | changes
    body = {name: value for name, value in body.items() if value is not None}
    signature = CLIENT.sign_data(in_domain("seal-hello/2", canonical_json(body)))
    return canonical_json({"body": body, "signature": signature.hex()})


def refusal_of(data: bytes) -> SealRefusal:
    with pytest.raises(SealError) as caught:
        read_hello(data, TERMS, CLIENT.public)
    return caught.value.reason


@pytest.mark.parametrize("reply_to", [b"", b"\x04" * 32])
def test_a_hello_is_read_as_it_was_signed(reply_to):
    share = b"\x03" * (1120 if reply_to else 1216)
    hello = HandshakeHello(TERMS, b"\x01" * 16, MAX_EPOCH, b"\x02" * 32, share, reply_to)

    assert read_hello(hello.sign_hello(CLIENT), TERMS, CLIENT.public) == hello


def test_a_hello_of_another_key_or_with_an_altered_signature_is_refused():
    with pytest.raises(SignatureError, match="client-a"):
        read_hello(HELLO.sign_hello(SERVER), TERMS, CLIENT.public)
    message = json.loads(HELLO.sign_hello(CLIENT))
    message["body"]["epoch"] = 2
    with pytest.raises(SignatureError, match="does not match"):
        read_hello(canonical_json(message), TERMS, CLIENT.public)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run": "run-2"}, SealRefusal.FOREIGN_RUN),
        ({"config_digest": b"\x55" * 32}, SealRefusal.FOREIGN_CONFIG),
        ({"attestation": b"\x55" * 32}, SealRefusal.FOREIGN_ATTESTATION),
        ({"client": "client-b"}, SealRefusal.FOREIGN_PARTY),
        ({"server": "client-b"}, SealRefusal.FOREIGN_PARTY),
        ({"chunk_bytes": 64}, SealRefusal.FOREIGN_CHUNKING),
    ],
)
def test_a_hello_under_other_terms_is_refused_by_what_differs(change, reason):
    hello = HandshakeHello(other_terms(**change), HELLO.session, 1, HELLO.salt, HELLO.share)

    assert refusal_of(hello.sign_hello(CLIENT)) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 1}, SealRefusal.OTHER_VERSION),
        ({"version": 0}, SealRefusal.OTHER_VERSION),
        ({"version": True}, SealRefusal.MALFORMED),
        ({"epoch": 0}, SealRefusal.MALFORMED),
        ({"epoch": -1}, SealRefusal.MALFORMED),
        ({"epoch": MAX_EPOCH + 1}, SealRefusal.MALFORMED),
        ({"epoch": None}, SealRefusal.MALFORMED),
        ({"further": 1}, SealRefusal.MALFORMED),
        ({"salt": "02" * 31}, SealRefusal.MALFORMED),
        ({"salt": "0A" * 32}, SealRefusal.MALFORMED),
        ({"share": "03" * 33}, SealRefusal.MALFORMED),
        ({"session": ""}, SealRefusal.MALFORMED),
        ({"reply_to": "04"}, SealRefusal.MALFORMED),
        ({"reply_to": "04" * 31}, SealRefusal.MALFORMED),
        ({"run": 1}, SealRefusal.MALFORMED),
    ],
)
def test_a_hello_of_another_form_is_refused_although_it_is_signed(change, reason):
    assert refusal_of(altered(**change)) == reason


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"[]", b"\xff", canonical_json({"body": {}, "signature": ""}), HELLO.sign_hello(CLIENT) + b" ",
     canonical_json({"body": {}, "signature": "00" * 64, "more": 1}), b"[" * 4000, bytes(MAX_HELLO_BYTES + 1)],
    ids=["empty", "no keys", "list", "no text", "short signature", "trailing blank", "more keys", "deep", "large"],
)  # fmt: skip
def test_bytes_that_are_no_hello_are_refused(data):
    assert refusal_of(data) == SealRefusal.MALFORMED
