"""The key schedule of a channel: from its secret to one AES-256-GCM key per direction and purpose.

Source: RFC 5869 (HKDF), NIST SP 800-38D (GCM).
"""

import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from phalanx.errors import SealError
from phalanx.security.crypto import in_domain
from phalanx.security.seal.context import Context, Direction, Purpose
from phalanx.security.seal.header import SealRefusal

KEY_BYTES = 32
_LANE = struct.Struct(">BBI")


def derive_ciphers(
    secret: bytes | bytearray, transcript: bytes, context: Context, direction: Direction, epoch: int
) -> dict[Purpose, AESGCM]:
    """Derive the ciphers of one direction.

    Args:
        secret: 32 bytes or more that both ends share: an X25519 result, or the output of a TLS exporter.
        transcript: 32 bytes, SHA-256 over all that was said to agree on the secret, both ends' fresh salts in it.
        context: Goes into every key: another run, config, attestation, party or session gives unrelated keys.

    Returns:
        One cipher for each purpose. No copy of a key stays in Python's memory; that of OpenSSL is cleared
        when the cipher is no longer referred to.
    """
    if len(secret) < KEY_BYTES or len(transcript) != KEY_BYTES:
        raise SealError(SealRefusal.MALFORMED, "keys: expected a secret of at least 32 bytes, a transcript of 32")
    return {
        purpose: derived_cipher(secret, transcript, key_info(context, direction, purpose, epoch)) for purpose in Purpose
    }


def key_info(context: Context, direction: Direction, purpose: Purpose, epoch: int) -> bytes:
    """Return the HKDF info of one lane: everything that its key is bound to beside secret and transcript."""
    return in_domain("seal-key/1", context.encoded + _LANE.pack(direction, purpose, epoch))


def wipe_buffer(buffer: bytearray | memoryview) -> None:
    """Overwrite with zeros; of a memoryview, its elements are bytes."""
    zeros = bytes(min(len(buffer), 2**20))
    for start in range(0, len(buffer), 2**20):
        size = min(len(zeros), len(buffer) - start)
        buffer[start : start + size] = zeros[:size]


def cipher_of(key: bytearray) -> AESGCM:
    """Make a cipher and wipe the key that it was made of."""
    if _CIPHERS_COPY_THEIR_KEY:
        cipher = AESGCM(key)
        wipe_buffer(key)
        return cipher
    return AESGCM(bytes(key))


def derived_cipher(secret: bytes | bytearray, salt: bytes, info: bytes) -> AESGCM:
    """Make the cipher of a key that HKDF-SHA-256 gives."""
    key = bytearray(KEY_BYTES)
    HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=salt, info=info).derive_into(secret, key)
    return cipher_of(key)


def _ciphers_copy_their_key() -> bool:
    """Whether a key may be wiped once its cipher exists; one that reads it later would encrypt with zeros."""
    nonce, key = bytes(12), bytearray(b"\x01" * KEY_BYTES)
    cipher = AESGCM(key)
    wipe_buffer(key)
    return cipher.encrypt(nonce, b"", None) == AESGCM(b"\x01" * KEY_BYTES).encrypt(nonce, b"", None)


_CIPHERS_COPY_THEIR_KEY = _ciphers_copy_their_key()
