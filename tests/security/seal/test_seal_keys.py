import hashlib
import hmac
import itertools
import struct
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sealed_pair import CUT, TERMS, other_terms, plain

from phalanx.errors import SealError
from phalanx.security.seal import Purpose, Sender, keys
from phalanx.security.seal.context import Context, Direction
from phalanx.security.seal.direction import DirectionState
from phalanx.security.seal.keys import derive_ciphers, key_info, wipe_buffer

SECRET, TRANSCRIPT, SESSION = bytes(range(32)), bytes(range(32, 64)), bytes(range(16))
CONTEXT = Context(TERMS, SESSION)

# RFC 5869, appendix A: test cases 1 to 3
RFC_5869 = [
    (
        "0b" * 22,
        "000102030405060708090a0b0c",
        "f0f1f2f3f4f5f6f7f8f9",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)).hex(),
        bytes(range(0x60, 0xB0)).hex(),
        bytes(range(0xB0, 0x100)).hex(),
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
        "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    (
        "0b" * 22,
        "",
        "",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]

# the vectors that NIST SP 800-38D refers to (McGrew and Viega 2005), AES-256: test cases 13 to 16
GCM = [
    ("00" * 32, "00" * 12, "", "", "530f8afbc74536b9a963b4f1c4cb738b"),
    ("00" * 32, "00" * 12, "00" * 16, "", "cea7403d4d606b6e074ec5d3baf39d18d0d1c8a799996bf0265b98b5d48ab919"),
    (
        "feffe9928665731c6d6a8f9467308308" * 2,
        "cafebabefacedbaddecaf888",
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b391aafd255",
        "",
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662898015ad"
        "b094dac5d93471bdec1a502270e3cc6c",
    ),
    (
        "feffe9928665731c6d6a8f9467308308" * 2,
        "cafebabefacedbaddecaf888",
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
        "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39",
        "feedfacedeadbeeffeedfacedeadbeefabaddad2",
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
        "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
        "76fc6ece0f4e1768cddf8853bb2d551b",
    ),
]


@pytest.mark.parametrize(("secret", "salt", "info", "expected"), RFC_5869)
def test_the_key_derivation_function_is_that_of_rfc_5869(secret, salt, info, expected):
    out = bytearray(len(expected) // 2)
    hkdf = HKDF(algorithm=SHA256(), length=len(out), salt=bytes.fromhex(salt), info=bytes.fromhex(info))

    hkdf.derive_into(bytes.fromhex(secret), out)

    assert out.hex() == expected


@pytest.mark.parametrize(("key", "nonce", "data", "about", "expected"), GCM)
def test_the_cipher_is_aes_256_gcm(key, nonce, data, about, expected):
    key, nonce, data, about, expected = map(bytes.fromhex, (key, nonce, data, about, expected))
    out, back = bytearray(len(expected)), bytearray(len(data))

    AESGCM(key).encrypt_into(nonce, data, about, out)
    AESGCM(key).decrypt_into(nonce, out, about, back)

    assert out == expected
    assert back == data


def by_hand(purpose, direction=Direction.TO_SERVER, epoch=1):
    """HKDF-SHA-256 of one block, from its definition."""
    extracted = hmac.digest(TRANSCRIPT, SECRET, "sha256")
    return hmac.digest(extracted, key_info(CONTEXT, direction, purpose, epoch) + b"\x01", "sha256")


@pytest.mark.parametrize("purpose", Purpose)
def test_each_key_is_what_its_definition_gives(purpose):
    ciphers = derive_ciphers(SECRET, TRANSCRIPT, CONTEXT, Direction.TO_SERVER, 1)

    found = ciphers[purpose].encrypt(bytes(12), b"data", b"about")

    assert found == AESGCM(by_hand(purpose)).encrypt(bytes(12), b"data", b"about")


def test_a_frame_is_the_one_that_this_version_always_makes():
    ciphers = derive_ciphers(SECRET, TRANSCRIPT, CONTEXT, Direction.TO_SERVER, 7)

    frame = Sender(DirectionState(CONTEXT, Direction.TO_SERVER, 7, ciphers)).seal_tensor(CUT, 3, 2, plain())

    # written out by hand: prefix, direction, session, epoch, counter, step, microbatch, chunk bytes, chunks; the tensor
    header = b"PHSF\x01\x01" + SESSION + struct.pack(">IQQIII", 7, 0, 3, 2, 32, 3)
    header += struct.pack(">HBBBB3sQ", 15, 1, 1, 1, 3, b"cut", 70)
    fields = (b"run-1", b"\x11" * 32, b"\x22" * 32, b"client-a", b"enclave", struct.pack(">I", 32), SESSION)
    about = b"phalanx/seal-chunk/1\0" + b"".join(struct.pack(">H", len(f)) + f for f in fields) + header
    cipher = AESGCM(by_hand(Purpose.ACTIVATION, epoch=7))
    chunks = [
        cipher.encrypt(struct.pack(">IQ", 7, i), plain()[32 * i : 32 * i + 32], about + struct.pack(">I", i))
        for i in range(3)
    ]
    assert frame == header + b"".join(chunks)
    assert hashlib.sha256(frame).hexdigest() == "32b77ad7a8be9aec59c9f7617a0b21f4f07243bb11ef36261625b02a2d0705ab"


def test_no_two_lanes_have_the_same_key():
    contexts = [
        CONTEXT,
        Context(TERMS, bytes(16)),
        *(
            Context(other_terms(**change), SESSION)
            for change in (
                {"run": "run-2"},
                {"config_digest": b"\x12" * 32},
                {"attestation": b"\x23" * 32},
                {"client": "client-b"},
                {"server": "enclave-b"},
                {"chunk_bytes": 64},
                # what ends one field must not begin the next
                {"client": "client-", "server": "aenclave"},
            )
        ),
    ]
    lanes = list(itertools.product(contexts, Direction, Purpose, (1, 2)))

    texts = {
        derive_ciphers(SECRET, TRANSCRIPT, context, direction, epoch)[purpose].encrypt(bytes(12), bytes(16), None)
        for context, direction, purpose, epoch in lanes
    }

    assert len(texts) == len(lanes)
    other_secret = derive_ciphers(bytes(32), TRANSCRIPT, CONTEXT, Direction.TO_SERVER, 1)
    other_salt = derive_ciphers(SECRET, bytes(32), CONTEXT, Direction.TO_SERVER, 1)
    assert not {c[Purpose.LABEL].encrypt(bytes(12), bytes(16), None) for c in (other_secret, other_salt)} & texts


def test_a_key_is_wiped_once_its_cipher_exists(monkeypatch):
    seen = []

    class Watched:
        def __init__(self, key):
            seen.append((key, bytes(key)))

    monkeypatch.setattr(keys, "AESGCM", Watched)

    derive_ciphers(SECRET, TRANSCRIPT, CONTEXT, Direction.TO_SERVER, 1)

    assert [before for _, before in seen] == [by_hand(purpose) for purpose in Purpose]
    assert {bytes(after) for after, _ in seen} == {bytes(32)}


def test_a_library_that_reads_the_key_later_does_not_make_it_zeros(monkeypatch):
    class Lazy:
        def __init__(self, key):
            self._key = key

        def encrypt(self, nonce, data, about):
            return AESGCM(bytes(self._key)).encrypt(nonce, data, about)

    monkeypatch.setattr(keys, "AESGCM", Lazy)
    assert not keys._ciphers_copy_their_key()
    monkeypatch.setattr(keys, "_CIPHERS_COPY_THEIR_KEY", keys._ciphers_copy_their_key())

    ciphers = derive_ciphers(SECRET, TRANSCRIPT, CONTEXT, Direction.TO_SERVER, 1)

    expected = AESGCM(by_hand(Purpose.LABEL)).encrypt(bytes(12), b"", None)
    assert ciphers[Purpose.LABEL].encrypt(bytes(12), b"", None) == expected


@pytest.mark.parametrize(("secret", "transcript"), [(b"", TRANSCRIPT), (bytes(31), TRANSCRIPT), (SECRET, bytes(31))])
def test_a_secret_or_transcript_that_is_too_short_is_refused(secret, transcript):
    with pytest.raises(SealError, match="malformed"):
        derive_ciphers(secret, transcript, CONTEXT, Direction.TO_SERVER, 1)


@pytest.mark.parametrize("size", [0, 5, 2**20, 2**20 + 3])
def test_wiping_leaves_zeros_of_the_same_length(size):
    buffer = bytearray(b"k" * size)

    wipe_buffer(memoryview(buffer))

    assert buffer == bytes(size)


@pytest.mark.parametrize(
    "changes",
    [
        {"run": ""},
        {"run": "a b"},
        {"config_digest": b""},
        {"attestation": bytes(31)},
        {"attestation": bytes(32)},
        {"client": "enclave"},
        {"chunk_bytes": 0},
        {"chunk_bytes": 8 * 2**20 + 1},
        {"chunk_bytes": True},
    ],
)
def test_terms_that_say_nothing_or_too_much_are_refused(changes):
    with pytest.raises(SealError, match="malformed"):
        replace(TERMS, **changes)


def test_a_session_of_another_length_is_refused():
    with pytest.raises(SealError, match="malformed"):
        Context(TERMS, bytes(15))
