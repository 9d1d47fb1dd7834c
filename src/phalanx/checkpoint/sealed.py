"""A file under AES-256-GCM, in chunks: no plain byte reaches the disk, and every chunk knows its place."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from phalanx.config import canonical_json
from phalanx.errors import CheckpointError
from phalanx.security.crypto import in_domain

SEALED = ".sealed"
"""Suffix of encrypted files."""
_CHUNK_BYTES = 2**20
_TAG_BYTES = 16
_MAGIC = b"phalanx-sealed-1"


@dataclass(frozen=True)
class FilePlace:
    """The file and the checkpoint that a chunk belongs to; it opens nowhere else.

    Attributes:
        step: Number of optimizer steps that are in it.
    """

    run: str
    step: int
    file: str


class FileSealer:
    """A sealer of the files of one checkpoint, which it also opens.

    Each file has a key of its own, by HKDF-SHA256 from the checkpoint's data key, which is drawn anew for every
    checkpoint: so counting nonces never repeat under one key.

    Args:
        data_key: 32 random bytes.
    """

    def __init__(self, data_key: bytes) -> None:
        self._data_key = data_key

    def seal_file(self, place: FilePlace, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
        """Yield the encrypted file; its last chunk says that it is the last, so that no cut passes for an end."""
        cipher = self._file_cipher(place)
        yield _MAGIC
        for index, chunk in enumerate(_full_chunks(pieces)):
            last = len(chunk) < _CHUNK_BYTES
            yield cipher.encrypt(_chunk_nonce(index), chunk, _associated_data(place, index, last=last))

    def open_file(self, place: FilePlace, data: bytes, where: str) -> bytes:
        """Decrypt a whole file."""
        if not data.startswith(_MAGIC):
            raise CheckpointError(f"{where}: is not an encrypted file of this version; use an older checkpoint")
        cipher, plain = self._file_cipher(place), bytearray()
        body = memoryview(data)[len(_MAGIC) :]
        size = _CHUNK_BYTES + _TAG_BYTES
        count = len(body) // size + 1
        for index in range(count):
            chunk = body[index * size : (index + 1) * size]
            try:
                plain += cipher.decrypt(
                    _chunk_nonce(index), chunk, _associated_data(place, index, last=index == count - 1)
                )
            except (InvalidTag, ValueError) as exc:
                raise CheckpointError(
                    f"{where}: chunk {index} of {count} does not open: altered, cut or from another file, step or run, "
                    "or the data key is another one; use an older checkpoint"
                ) from exc
        return bytes(plain)

    def key_commitment(self, run: str, step: int) -> str:
        """Return the manifest's commitment to the data key, hex; nothing can be computed from it."""
        return self._derive_key(["commitment", run, step]).hex()

    def _file_cipher(self, place: FilePlace) -> AESGCM:
        return AESGCM(self._derive_key(["file", place.run, place.step, place.file]))

    def _derive_key(self, about: list[str | int]) -> bytes:
        info = in_domain("checkpoint-file-key/1", canonical_json(about))
        return HKDF(algorithm=SHA256(), length=32, salt=None, info=info).derive(self._data_key)

    def __repr__(self) -> str:
        return "FileSealer(...)"


def _full_chunks(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield full chunks and then one that is shorter, empty if need be."""
    buffer = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        while view:
            taken = view[: _CHUNK_BYTES - len(buffer)]
            buffer += taken
            view = view[len(taken) :]
            if len(buffer) == _CHUNK_BYTES:
                yield bytes(buffer)
                buffer.clear()
    yield bytes(buffer)


def _chunk_nonce(index: int) -> bytes:
    return index.to_bytes(12, "big")


def _associated_data(place: FilePlace, index: int, *, last: bool) -> bytes:
    return in_domain("checkpoint-chunk/1", canonical_json([place.run, place.step, place.file, index, last]))
