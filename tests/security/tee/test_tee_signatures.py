"""Signatures of certificates and reports: the right key, curve, hash and parameters; anything else is refused."""

from functools import cache

import pytest
from authority import integer, oid, p256, p384, rsa_key, tlv
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from refusals import refusal

from phalanx.security.tee.formats.signature import (
    check_ecdsa,
    check_raw_ecdsa,
    check_x509_signature,
    load_key,
    point_to_key,
)

SIGNED = b"what is signed"
NULL = tlv(0x05)
ECDSA_256, ECDSA_384 = "1.2.840.10045.4.3.2", "1.2.840.10045.4.3.3"
RSA_256, RSA_PSS, MGF1 = "1.2.840.113549.1.1.11", "1.2.840.113549.1.1.10", "1.2.840.113549.1.1.8"
SHA256, SHA384, SHA1 = "2.16.840.1.101.3.4.2.1", "2.16.840.1.101.3.4.2.2", "1.3.14.3.2.26"


@cache
def curve_key(size: int) -> ec.EllipticCurvePrivateKey:
    return p256() if size == 256 else p384()


def spki(key) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def algorithm(name: str, *parameters: bytes) -> bytes:
    return tlv(0x30, oid(name), *parameters)


def pss(digest: str = SHA256, mask: str = SHA256, salt: int = 32, *, function: str = MGF1, trailer: int = 1) -> bytes:
    """The parameters of RSASSA-PSS (RFC 4055)."""
    fields = (
        tlv(0xA0, algorithm(digest, NULL)),
        tlv(0xA1, algorithm(function, algorithm(mask, NULL))),
        tlv(0xA2, integer(salt)),
        *([tlv(0xA3, integer(trailer))] if trailer != 1 else []),
    )
    return algorithm(RSA_PSS, tlv(0x30, *fields))


def check(key, name: bytes, signature: bytes, signed: bytes = SIGNED) -> None:
    check_x509_signature(spki(key), name, signature, signed, "thing")


def sign_ecdsa(size: int = 256, digest: hashes.HashAlgorithm | None = None) -> bytes:
    return curve_key(size).sign(SIGNED, ec.ECDSA(digest or hashes.SHA256()))


def sign_rsa(scheme: padding.AsymmetricPadding) -> bytes:
    return rsa_key("signer").sign(SIGNED, scheme, hashes.SHA256())


def test_signatures_of_every_accepted_form_pass():
    check(curve_key(256), algorithm(ECDSA_256), sign_ecdsa())
    check(curve_key(384), algorithm(ECDSA_384), sign_ecdsa(384, hashes.SHA384()))
    check(rsa_key("signer"), algorithm(RSA_256, NULL), sign_rsa(padding.PKCS1v15()))
    check(rsa_key("signer"), pss(), sign_rsa(padding.PSS(padding.MGF1(hashes.SHA256()), 32)))


@pytest.mark.parametrize("change", ["signed", "signature", "hash"])
def test_another_text_signature_or_hash_does_not_match(change):
    signature = sign_ecdsa()
    arguments = {
        "signed": (algorithm(ECDSA_256), signature, SIGNED + b"!"),
        "signature": (algorithm(ECDSA_256), sign_ecdsa(256, hashes.SHA384()), SIGNED),
        "hash": (algorithm(ECDSA_384), signature, SIGNED),
    }[change]

    assert refusal(lambda: check(curve_key(256), *arguments)) == "bad_signature"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("rsa", algorithm(ECDSA_256)),
        ("ec", algorithm(RSA_256, NULL)),
        ("ec", pss()),
        ("ec", algorithm(SHA1)),
        ("ec", algorithm(ECDSA_256, NULL)),
        ("rsa", algorithm(RSA_256)),
        ("rsa", algorithm(RSA_256, tlv(0x05, b"\0"))),
        ("rsa", algorithm(RSA_256, NULL, NULL)),
        ("rsa", pss(mask=SHA384)),
        ("rsa", pss(salt=20)),
        ("rsa", pss(digest=SHA1, mask=SHA1)),
        ("rsa", pss(function=SHA256)),
        ("rsa", pss(trailer=2)),
        ("rsa", tlv(0x30)),
        ("rsa", b""),
    ],
    ids=["ECDSA by RSA key", "RSA by curve key", "PSS by curve key", "unknown", "ECDSA with parameters",
         "RSA without NULL", "NULL with content", "two parameters", "mask of another hash", "short salt", "SHA-1",
         "no mask function", "trailer", "no name", "empty"],
)  # fmt: skip
def test_algorithms_that_do_not_belong_to_the_key_or_have_other_parameters_are_refused(key, name):
    signer = rsa_key("signer") if key == "rsa" else curve_key(256)

    assert refusal(lambda: check(signer, name, b"signature")) == "malformed"


def test_keys_that_are_weak_or_of_another_kind_are_refused():
    for key in (
        rsa.generate_private_key(65537, 1024),
        ec.generate_private_key(ec.SECP256K1()),
        ed25519.Ed25519PrivateKey.generate(),
    ):
        der = spki(key)
        assert refusal(lambda der=der: load_key(der, "thing")) == "malformed"
    assert refusal(lambda: load_key(b"no key", "thing")) == "malformed"
    assert load_key(spki(rsa_key("signer")), "thing").key_size == 2048


def raw_signature(key: ec.EllipticCurvePrivateKey, digest: hashes.HashAlgorithm, width: int) -> bytes:
    r, s = decode_dss_signature(key.sign(SIGNED, ec.ECDSA(digest)))
    return r.to_bytes(width, "big") + s.to_bytes(width, "big")


def test_a_raw_signature_is_two_numbers_of_the_curve_of_the_format():
    key, signature = curve_key(256), raw_signature(curve_key(256), hashes.SHA256(), 32)
    public = key.public_key()

    check_raw_ecdsa(public, ec.SECP256R1, signature, SIGNED, "thing")
    swapped = signature[32:] + signature[:32]
    assert refusal(lambda: check_raw_ecdsa(public, ec.SECP256R1, swapped, SIGNED, "thing")) == "bad_signature"
    assert refusal(lambda: check_raw_ecdsa(public, ec.SECP256R1, bytes(64), SIGNED, "thing")) == "bad_signature"
    assert refusal(lambda: check_raw_ecdsa(public, ec.SECP384R1, signature, SIGNED, "thing")) == "wrong_signer"
    assert refusal(lambda: check_ecdsa(rsa_key("signer").public_key(), ec.SECP256R1, 1, 1, SIGNED, "thing")) == (
        "wrong_signer"
    )


def test_the_curve_chooses_the_hash():
    key = curve_key(384)
    check_raw_ecdsa(key.public_key(), ec.SECP384R1, raw_signature(key, hashes.SHA384(), 48), SIGNED, "thing")
    other = raw_signature(key, hashes.SHA256(), 48)

    assert refusal(lambda: check_raw_ecdsa(key.public_key(), ec.SECP384R1, other, SIGNED, "thing")) == "bad_signature"


def test_a_point_off_the_curve_is_no_key():
    numbers = curve_key(256).public_key().public_numbers()
    point = numbers.x.to_bytes(32, "big") + numbers.y.to_bytes(32, "big")

    assert point_to_key(point, ec.SECP256R1(), "thing").public_numbers() == numbers
    for broken in (point[:-1] + bytes([point[-1] ^ 1]), point[:-1], bytes(64), b""):
        assert refusal(lambda broken=broken: point_to_key(broken, ec.SECP256R1(), "thing")) == "malformed"
