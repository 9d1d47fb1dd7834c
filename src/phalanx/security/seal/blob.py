"""Sealed state at rest: adapters and optimizer states that only the enclave can open, and only in their newest form.

    "PHSB" | u8 version | u64 number | 32 salt | u64 size | chunk 0 | tag 0 | chunk 1 | tag 1 | ...

The number comes from a monotonic counter and belongs to this blob alone, so no two blobs have the same one, and a blob
is the newest exactly if its number equals the counter's.
"""

import logging
import secrets
import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from phalanx.config import canonical_json
from phalanx.errors import CheckpointError, RollbackError
from phalanx.security.crypto import MonotonicCounter, in_domain
from phalanx.security.seal.direction import Readable, flat_view
from phalanx.security.seal.header import TAG_BYTES, count_chunks
from phalanx.security.seal.keys import KEY_BYTES, derived_cipher, wipe_buffer

_MAGIC, _VERSION = b"PHSB", 1
_HEADER = struct.Struct(">4sBQ32sQ")
_SALT_BYTES = 32
_CHUNK_BYTES = 2**20
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BlobPlace:
    """The place that a blob belongs to; it opens nowhere else.

    Attributes:
        name: Such as ``adapters``.
    """

    run: str
    name: str
    step: int

    @property
    def encoded_place(self) -> bytes:
        """All of it in one unambiguous way."""
        return canonical_json([self.run, self.name, self.step])


class BlobSealer:
    """A sealer of states under one key and one counter, which it also opens.

    Args:
        key: 32 bytes that the sealer of the enclave gives back to the same measurement only.

    Guarantees:
        Every blob has a key of its own, from a fresh salt and its number. A blob that is older than the newest
        is refused as far as the counter cannot be turned back. A crash between `seal` and the moment at which the blob
        is safe on the disk leaves the blob before it refused as well: whether it may be used all the same
        is a person's decision (`unsafe_accept_behind`), as nothing tells a crash there from a rollback.
    """

    def __init__(self, key: bytes, counter: MonotonicCounter) -> None:
        if len(key) != KEY_BYTES:
            raise CheckpointError(f"blob: a key of {len(key)} bytes, expected {KEY_BYTES}")
        self._key, self._counter = bytearray(key), counter

    def seal_blob(self, place: BlobPlace, data: Readable) -> bytearray:
        """Encrypt a state; every blob before it is void from now on."""
        self._check_open()
        view, salt = flat_view(data, f"blob {place.name}"), secrets.token_bytes(_SALT_BYTES)
        number = self._counter.increment()
        header = _HEADER.pack(_MAGIC, _VERSION, number, salt, view.nbytes)
        cipher, associated = self._derive_cipher(place, number, salt), _associated_data(place, header)
        chunks = count_chunks(view.nbytes, _CHUNK_BYTES)
        blob = bytearray(_HEADER.size + view.nbytes + TAG_BYTES * chunks)
        blob[: _HEADER.size] = header
        out = memoryview(blob)
        for index in range(chunks):
            chunk = view[index * _CHUNK_BYTES : (index + 1) * _CHUNK_BYTES]
            start = _HEADER.size + index * (_CHUNK_BYTES + TAG_BYTES)
            cipher.encrypt_into(_chunk_nonce(index), chunk, associated, out[start : start + chunk.nbytes + TAG_BYTES])
        return blob

    def open_blob(self, place: BlobPlace, blob: Readable, *, unsafe_accept_behind: int = 0) -> bytearray:
        """Decrypt the newest state.

        Args:
            unsafe_accept_behind: How many numbers older than the newest the blob may be; a person's decision after a
                crash, never a default.

        Raises:
            RollbackError: It is older than that, or newer than the counter, which then went back.
            CheckpointError: It is altered, truncated, from another place or under another key; or the
                sealer is closed.
        """
        self._check_open()
        view = flat_view(blob, f"blob {place.name}")
        header, number, salt, size = _parse_blob(view, place)
        plain = bytearray(size)
        self._decrypt_chunks(place, (header, number, salt), view, plain)
        # only of a blob that is ours does the number mean anything
        newest = self._counter.read_count()
        if not newest - unsafe_accept_behind <= number <= newest:
            wipe_buffer(plain)
            cause = (
                "an older state was put back, or a crash lost the newest"
                if number < newest
                else "the counter went back"
            )
            raise RollbackError(f"blob {place.name}: has number {number}, the newest is {newest}; {cause}")
        if number < newest:
            logger.warning("blob %s: number %d is used although %d was the newest", place.name, number, newest)
        return plain

    @staticmethod
    def read_number(place: BlobPlace, blob: Readable) -> int:
        """Return the number in a blob's header, which only `open_blob` proves."""
        return _parse_blob(flat_view(blob, f"blob {place.name}"), place)[1]

    def close(self) -> None:
        """Forget the key; closing twice is harmless."""
        wipe_buffer(self._key)
        self._key = bytearray()

    def _decrypt_chunks(
        self, place: BlobPlace, head: tuple[bytes, int, bytes], view: memoryview, plain: bytearray
    ) -> None:
        header, number, salt = head
        cipher, associated, out = (
            self._derive_cipher(place, number, salt),
            _associated_data(place, header),
            memoryview(plain),
        )
        chunks, index = count_chunks(len(plain), _CHUNK_BYTES), 0
        try:
            for index in range(chunks):
                chunk = out[index * _CHUNK_BYTES : (index + 1) * _CHUNK_BYTES]
                start = _HEADER.size + index * (_CHUNK_BYTES + TAG_BYTES)
                cipher.decrypt_into(
                    _chunk_nonce(index), view[start : start + chunk.nbytes + TAG_BYTES], associated, chunk
                )
        except InvalidTag as exc:
            wipe_buffer(plain)
            raise CheckpointError(
                f"blob {place.name}: chunk {index} of {chunks} does not open: altered, from another run, name or step, "
                "or sealed for another measurement"
            ) from exc

    def _derive_cipher(self, place: BlobPlace, number: int, salt: bytes) -> AESGCM:
        info = in_domain("seal-blob-key/1", number.to_bytes(8, "big") + place.encoded_place)
        return derived_cipher(self._key, salt, info)

    def _check_open(self) -> None:
        if not self._key:
            raise CheckpointError("blob: the sealer is closed")

    def __repr__(self) -> str:
        return "BlobSealer(...)"


def _parse_blob(view: memoryview, place: BlobPlace) -> tuple[bytes, int, bytes, int]:
    if view.nbytes < _HEADER.size:
        raise CheckpointError(f"blob {place.name}: {view.nbytes} bytes, its header alone has {_HEADER.size}")
    magic, version, number, salt, size = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _VERSION:
        raise CheckpointError(f"blob {place.name}: is no sealed state of this version")
    expected = _HEADER.size + size + TAG_BYTES * count_chunks(size, _CHUNK_BYTES)
    if view.nbytes != expected:
        raise CheckpointError(f"blob {place.name}: {view.nbytes} bytes, expected {expected}; it is cut or longer")
    return bytes(view[: _HEADER.size]), number, salt, size


def _associated_data(place: BlobPlace, header: bytes) -> bytes:
    return in_domain("seal-blob/1", header + place.encoded_place)


def _chunk_nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")
