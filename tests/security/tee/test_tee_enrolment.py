"""Enrolling a TPM: only the TPM with the certified EK and this very AK can answer."""

import hashlib
import hmac

import pytest
from authority import NOW, Form, issue, p256, p384
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from refusals import refusal
from tcg import AK_ATTRIBUTES, Tpm

from phalanx.security.tee import begin_enrolment
from phalanx.security.tee.formats.chain import Trust
from phalanx.security.tee.tpm.enrol import _encrypt_cfb, _kdf_a


@pytest.fixture(scope="module")
def tpm():
    return Tpm()


def trust(tpm):
    return Trust((tpm.root.parsed,), NOW)


def taken(data: bytes) -> tuple[bytes, bytes]:
    """A sized field and what follows it."""
    size = int.from_bytes(data[:2], "big")
    return data[2 : 2 + size], data[2 + size :]


def activate(ek, name: bytes, credential: bytes, encrypted: bytes) -> bytes | None:
    """What a TPM does: find the seed with its EK, check the integrity for the AK's name, decrypt."""
    seed = seed_of(ek, taken(encrypted)[0])
    outer, identity = taken(taken(credential)[0])
    integrity = _kdf_a("sha256", seed, b"INTEGRITY", b"", 32)
    if not hmac.compare_digest(outer, hmac.digest(integrity, identity + name, "sha256")):
        return None
    storage = _kdf_a("sha256", seed, b"STORAGE", name, 16)
    out, previous = b"", bytes(16)
    for start in range(0, len(identity), 16):
        block = identity[start : start + 16]
        stream = _encrypt_cfb(storage, bytes(16)) if start == 0 else keystream(storage, previous)
        out += bytes(one ^ other for one, other in zip(block, stream, strict=False))
        previous = block
    return taken(out)[0]


def keystream(key: bytes, block: bytes) -> bytes:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)


def seed_of(ek, encrypted: bytes) -> bytes:
    if isinstance(ek, rsa.RSAPrivateKey):
        scheme = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), b"IDENTITY\0")
        return ek.decrypt(encrypted, scheme)
    x, rest = taken(encrypted)
    y, _ = taken(rest)
    theirs = ec.EllipticCurvePublicKey.from_encoded_point(ek.curve, b"\x04" + x + y)
    own = ek.public_key().public_numbers().x.to_bytes(len(x), "big")
    return hashlib.sha256(b"\0\0\0\x01" + ek.exchange(ec.ECDH(), theirs) + b"IDENTITY\0" + x + own).digest()


def test_the_tpm_with_ek_and_ak_answers(tpm):
    begun = begin_enrolment(tpm.ek.der, b"", tpm.public(), trust(tpm))

    answer = activate(tpm.ek.key, bytes.fromhex(begun.ak_name), begun.credential, begun.encrypted_secret)

    assert begun.finish_enrolment(answer) == tpm.ak_name


@pytest.mark.parametrize("make", [p256, p384], ids=["p256", "p384"])
def test_an_ek_on_a_curve_answers_as_well(tpm, make):
    ek = issue("", make(), tpm.root, Form())
    begun = begin_enrolment(ek.der, tpm.root.pem, tpm.public(), trust(tpm))

    answer = activate(ek.key, bytes.fromhex(begun.ak_name), begun.credential, begun.encrypted_secret)

    assert begun.finish_enrolment(answer) == tpm.ak_name


def test_a_tpm_with_another_ak_cannot_answer(tpm):
    begun = begin_enrolment(tpm.ek.der, b"", tpm.public(), trust(tpm))
    other = bytes.fromhex(Tpm().ak_name)

    assert activate(tpm.ek.key, other, begun.credential, begun.encrypted_secret) is None
    assert refusal(lambda: begun.finish_enrolment(bytes(32))) == "wrong_signer"


def test_an_ek_of_no_pinned_vendor_cannot_be_enrolled(tpm):
    stranger = issue("", p256(), issue("Test TPM Manufacturer CA", p256()), Form())

    assert refusal(lambda: begin_enrolment(stranger.der, b"", tpm.public(), trust(tpm))) == "bad_chain"


def test_a_key_that_signs_anything_cannot_be_enrolled(tpm):
    loose = Tpm(attributes=AK_ATTRIBUTES & ~(1 << 16))

    assert refusal(lambda: begin_enrolment(tpm.ek.der, b"", loose.public(), trust(tpm))) == "wrong_signer"
