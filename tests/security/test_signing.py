import math

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from phalanx.config import canonical_json
from phalanx.errors import CertificateError, SignatureError
from phalanx.security.crypto import Identity, Peer, check_party_name, digest_hex, in_domain, parse_canonical

texts = st.text(st.characters(exclude_categories=["Cs"]))
numbers = st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner),
    max_leaves=12,
)


def test_digest_is_blake3_over_the_joined_buffers():
    data = bytes(range(256)) * 1000

    assert digest_hex(data[:7], memoryview(data)[7:]) == blake3(data).hexdigest()
    assert digest_hex() == blake3(b"").hexdigest()


def test_a_signature_of_one_domain_is_void_in_another():
    identity = Identity.without_certificate("owner")
    signature = identity.sign_data(in_domain("frame/1", b"data"))

    identity.public.verify_signature(signature, in_domain("frame/1", b"data"))

    with pytest.raises(SignatureError, match="owner"):
        identity.public.verify_signature(signature, in_domain("receipt/1", b"data"))


@pytest.mark.parametrize("position", [0, 31, 32, 63])
def test_a_signature_with_one_flipped_bit_is_refused(position):
    identity = Identity.without_certificate("owner")
    signature = bytearray(identity.sign_data(b"data"))
    signature[position] ^= 1

    with pytest.raises(SignatureError):
        identity.public.verify_signature(bytes(signature), b"data")


@pytest.mark.parametrize("signature", [b"", b"short", bytes(64), bytes(65)])
def test_what_is_no_signature_at_all_is_refused(signature):
    with pytest.raises(SignatureError):
        Identity.without_certificate("owner").public.verify_signature(signature, b"data")


def test_neither_repr_nor_str_of_an_identity_shows_a_secret():
    identity = Identity.without_certificate("owner")
    secret = identity.signing_key.private_bytes_raw()

    assert repr(identity) == str(identity) == "Identity('owner')"
    assert secret.hex() not in repr(vars(identity))


def test_a_peer_survives_the_trip_through_hex():
    peer = Identity.without_certificate("worker-1").public

    assert Peer.from_hex(peer.name, peer.public_key.hex()) == peer


@pytest.mark.parametrize("key", ["", "00", "zz" * 32, "00" * 33])
def test_a_malformed_public_key_is_refused(key):
    with pytest.raises(CertificateError):
        Peer.from_hex("worker", key)


@pytest.mark.parametrize("name", ["a", "0", "worker-1", "a" * 63])
def test_a_good_party_name_passes(name):
    assert check_party_name(name) == name


@pytest.mark.parametrize("name", ["", "-a", "A", "a.b", "a b", "a/..", "a\n", "ä", "a" * 64])
def test_a_bad_party_name_is_refused(name):
    with pytest.raises(CertificateError, match="party name"):
        check_party_name(name)


@given(st.dictionaries(texts, json_values))
def test_canonical_json_is_read_back_as_it_was(value):
    assert parse_canonical(canonical_json(value)) == value


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"1",
        b'{"b":1,"a":2}',
        b'{"a":1,"a":1}',
        b'{"a": 1}',
        b'{"a":1}\n',
        b'{"a":1.0e0}',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":9223372036854775808}',
        b'{"a":' + b"9" * 100_000 + b"}",
        b'{"a":"\\ud800"}',
        b'{"a":"\\u0061"}',
        b'{"a":"\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"a":' * 33 + b"1" + b"}" * 33,
        b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b"[" * 1_000_000,
    ],
)
def test_json_in_any_other_form_is_refused(data):
    with pytest.raises(ValueError, match=r"JSON|utf-8|Expecting|Extra|Unexpected|unterminated"):
        parse_canonical(data)


def test_brackets_inside_text_are_no_depth():
    value = {"a": "[" * 100 + "{" * 100}

    assert parse_canonical(canonical_json(value)) == value


def test_nesting_is_allowed_up_to_the_bound():
    data = b'{"a":' * 31 + b"{}" + b"}" * 31

    assert parse_canonical(data)


def test_a_number_that_is_no_number_cannot_be_written():
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"loss": math.nan})
