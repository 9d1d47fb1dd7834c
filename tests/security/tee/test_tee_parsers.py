"""The readers below everything: strict, and the same answer for every reader."""

import random

import pytest
from authority import NOW, Form, issue, p256
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refusal

from phalanx.errors import RefusedEvidenceError
from phalanx.security.tee import Evidence, parse_evidence
from phalanx.security.tee.formats.cbor import decode_cbor, encode_cbor
from phalanx.security.tee.formats.chain import Trust, check_chain
from phalanx.security.tee.formats.der import DerReader
from phalanx.security.tee.formats.x509 import parse_certificate, parse_crl, read_certificates

ITEMS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.binary(max_size=40) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.integers(-999, 999) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(ITEMS)
def test_cbor_that_was_written_is_read_again(value):
    assert decode_cbor(encode_cbor(value), "test") == value


def test_maps_are_written_by_the_order_of_their_encoded_keys():
    assert encode_cbor({"b": 1, "a": 2, 3: 0}) == bytes.fromhex("a3 0300 616102 616201")


@pytest.mark.parametrize(
    "data",
    [
        "",
        "00 00",
        "18 17",
        "19 00ff",
        "1a 0000ffff",
        "1c",
        "5f 41 00 ff",
        "7f 61 61 ff",
        "f9 3c00",
        "f7",
        "ff",
        "82 00",
        "82 00 ff",
        "a1 00",
        "a1 ff",
        "a2 00 00 00 00",
        "a1 40 00",
        "a1 f4 00",
        "bf 00 ff",
        "9f 00",
        "61 ff",
        "c1 00",
        "d2 d2 00",
        "5b ffffffffffffffff",
        "9b ffffffffffffffff",
        "81" * 20 + "00",
    ],
)
def test_cbor_that_two_readers_could_read_differently_is_malformed(data):
    assert refusal(lambda: decode_cbor(bytes.fromhex(data), "test")) == "malformed"


def test_sequences_of_indefinite_length_are_read():
    assert decode_cbor(bytes.fromhex("9f01bf0102ffff"), "test") == [1, {1: 2}]
    assert decode_cbor(bytes.fromhex("d280"), "test") == []


@pytest.mark.parametrize(
    "data",
    ["30 80 00 00", "30 81 01 00", "30 82 0001 00", "30 01", "1f 01 00", "30 84 00000001 00", "02 00"],
)
def test_der_in_another_than_its_one_form_is_malformed(data):
    reader = DerReader(bytes.fromhex(data), "test")

    assert (
        refusal(lambda: (reader.read_integer() if data.startswith("02") else reader.read_element(), reader.check_end()))
        == "malformed"
    )


@pytest.mark.parametrize(
    ("data", "read"),
    [
        ("02 02 00 01", DerReader.read_integer),
        ("02 02 ff 80", DerReader.read_integer),
        ("01 01 01", DerReader.read_boolean),
        ("03 02 01 00", DerReader.read_bits),
        ("06 02 80 01", DerReader.read_oid),
        ("06 01 80", DerReader.read_oid),
        ("17 0b" + b"2601010000Z".hex(), DerReader.read_time),
        ("17 0d" + b"261301000000Z".hex(), DerReader.read_time),
        ("18 0f" + b"20260230000000Z".hex(), DerReader.read_time),
        ("18 0f" + b"20260101000000+".hex(), DerReader.read_time),
        ("17 0d" + b"260101000000\xff".hex(), DerReader.read_time),
    ],
)
def test_der_values_in_another_than_their_one_form_are_malformed(data, read):
    assert refusal(lambda: read(DerReader(bytes.fromhex(data), "test"))) == "malformed"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_at_all_are_read_or_refused(data):
    for read in (parse_certificate, parse_crl, parse_evidence, lambda raw: decode_cbor(raw, "test")):
        try:
            read(data)
        except RefusedEvidenceError as exc:
            assert exc.reason == "malformed"


def test_certificates_are_read_as_a_second_reader_reads_them():
    root = issue("a root", p256())
    for holder in (root, issue("a leaf", p256(), root, Form(extensions=(("1.2.3.4", b"\x05\x00"),)))):
        parsed, other = holder.parsed, x509.load_der_x509_certificate(holder.der)

        assert parsed.serial == other.serial_number
        assert parsed.not_before == other.not_valid_before_utc
        assert parsed.not_after == other.not_valid_after_utc
        assert parsed.subject == other.subject.public_bytes()
        assert parsed.issuer == other.issuer.public_bytes()
        assert parsed.signed == other.tbs_certificate_bytes
        assert parsed.signature == other.signature
        assert set(parsed.extensions) == {one.oid.dotted_string for one in other.extensions}


def test_revocation_lists_are_read_as_a_second_reader_reads_them():
    root = issue("a root", p256())
    der = root.crl(5, 2**150)

    parsed, other = parse_crl(der), x509.load_der_x509_crl(der)

    assert parsed.serials == {one.serial_number for one in other} == {5, 2**150}
    assert (parsed.this_update, parsed.next_update) == (other.last_update_utc, other.next_update_utc)


def trust(root, **changes):
    return Trust((root.parsed,), NOW, **changes)


def test_an_authority_that_may_not_be_one_breaks_the_chain():
    root = issue("a root", p256())
    plain = issue("no authority", p256(), root, Form())
    silent = issue("may not sign", p256(), root, Form(is_authority=True, signs=False))
    narrow = issue("one level", p256(), root, Form(is_authority=True, path_length=0))
    below = issue("below", p256(), narrow, Form(is_authority=True))

    for issuer, others in ((plain, ()), (silent, ()), (below, (narrow,))):
        leaf = issue("a leaf", p256(), issuer, Form())
        pool = [one.parsed for one in (issuer, *others)]
        assert refusal(lambda leaf=leaf, pool=pool: check_chain(leaf.parsed, pool, trust(root))) == "bad_chain"
    leaf = issue("a leaf", p256(), narrow, Form())
    assert len(check_chain(leaf.parsed, [narrow.parsed], trust(root))) == 3


def test_a_critical_extension_that_is_not_understood_breaks_the_chain():
    root = issue("a root", p256())
    leaf = issue("a leaf", p256(), root, Form(extensions=(("1.2.3.4", b"\x05\x00"),), critical=("1.2.3.4",)))

    assert refusal(lambda: check_chain(leaf.parsed, [], trust(root))) == "bad_chain"


def test_certificates_that_issue_each_other_end_in_a_refusal():
    first, second = p256(), p256()
    one = issue("one", first, issue("two", second))
    two = issue("two", second, issue("one", first))
    root = issue("a root", p256())

    assert refusal(lambda: check_chain(one.parsed, [two.parsed, one.parsed], trust(root))) == "bad_chain"


def test_of_two_issuers_with_one_name_the_right_one_is_found():
    wrong, right = issue("a root", p256()), issue("a root", p256())
    leaf = issue("a leaf", p256(), right, Form())

    assert refusal(lambda: check_chain(leaf.parsed, [wrong.parsed], trust(right))) == "bad_chain"
    both = Trust((wrong.parsed, right.parsed), NOW)
    assert check_chain(leaf.parsed, [], both)[-1] == right.parsed
    assert check_chain(leaf.parsed, [wrong.parsed, right.parsed], both)[-1] == right.parsed


def test_pem_is_read_with_nothing_before_between_or_after():
    root = issue("a root", p256())

    assert len(read_certificates(root.pem * 3 + b"\0", "test")) == 3
    for data in (b"x" + root.pem, root.pem + b"x", root.pem[:-30], root.pem * 17, b"", b"-----BEGIN X-----"):
        assert refusal(lambda data=data: read_certificates(data, "test")) == "malformed"


def test_pem_has_one_form():
    pem = issue("a root", p256()).pem
    spaced = (pem.replace(b"\n", b" \n", 2), pem.replace(b"\n", b"\x0b", 2), pem + b" ", pem.replace(b"A", b"A ", 1))

    for data in spaced:
        assert refusal(lambda data=data: read_certificates(data, "test")) == "malformed"


def test_bits_behind_the_last_byte_of_base64_are_zero():
    pem = next(one for one in (issue("r" * n, p256()).pem for n in range(1, 40)) if b"=\n-----END" in one)
    last = pem.rstrip().rindex(b"\n-----END")
    place = last - len(pem[:last]) + len(pem[:last].rstrip(b"=")) - 1
    following = bytes([pem[place] + 1])

    assert read_certificates(pem, "test")
    assert refusal(lambda: read_certificates(pem[:place] + following + pem[place + 1 :], "test")) == "malformed"


def test_an_envelope_comes_back_as_it_was(binding):
    for evidence in (Evidence("snp", b"\x01\x02", {"vcek": b"", "chain": b"x"}, binding), Evidence("tpm", b"")):
        assert parse_evidence(evidence.to_bytes()) == evidence


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"phalanx_evidence":1', '"phalanx_evidence":2'),
        ('"phalanx_evidence":1', '"phalanx_evidence":true'),
        ('"kind":"snp"', '"kind":1'),
        ('"AQI="', '"AQJ="'),
        ('"AQI="', '"AQI"'),
        ('"AQI="', '"A QI="'),
        ('"AQI="', "7"),
        ('"role":"server"', '"role":"SERVER"'),
        ('"role":"server"', '"role":7'),
        ('"endorsements":{}', '"endorsements":[]'),
        ("{", " {"),
        (
            "}",
            "},",
        ),
        ('"kind":"snp"', '"kind":"snp","kind":"snp"'),
        ('"kind":"snp"', '"kind":"snp","more":1'),
    ],
)
def test_an_envelope_of_another_form_is_malformed(old, new, binding):
    text = Evidence("snp", b"\x01\x02", {}, binding).to_bytes().decode()
    assert old in text

    assert refusal(lambda: parse_evidence(text.replace(old, new, 1).encode())) == "malformed"


def test_random_der_like_bytes_never_crash():
    draw = random.Random(5)
    tags = bytes([0x30, 0x31, 0x02, 0x03, 0x04, 0x05, 0x06, 0x0C, 0x17, 0x18, 0xA0, 0xA3])

    for _ in range(3_000):
        data = b"".join(bytes([draw.choice(tags), draw.randrange(12)]) + draw.randbytes(3) for _ in range(8))
        for read in (parse_certificate, parse_crl):
            assert refusal(lambda read=read, data=data: read(data)) == "malformed"
