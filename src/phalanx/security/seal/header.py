"""The clear header of a sealed frame. It is a claim: each chunk authenticates it, and it must equal the one due.

    header | chunk 0 | tag 0 | chunk 1 | tag 1 | ...

    "PHSF" | u8 version | u8 direction | 16 session | u32 epoch | u64 counter | u64 step | u32 microbatch |
    u32 chunk bytes | u32 chunks | u16 length | purpose, dtype, name and shape

Numbers are big-endian. `counter` is that of the first chunk; each chunk takes one.
"""

import struct
from enum import StrEnum
from typing import NamedTuple

from phalanx.errors import SealError


class SealRefusal(StrEnum):
    """Every reason of a `SealError`; the values appear in messages and logs."""

    MALFORMED = "malformed"
    OTHER_VERSION = "other_version"
    TRUNCATED = "truncated"
    TOO_LONG = "too_long"
    FOREIGN_SESSION = "foreign_session"
    FOREIGN_DIRECTION = "foreign_direction"
    FOREIGN_EPOCH = "foreign_epoch"
    REPLAYED = "replayed"
    OUT_OF_ORDER = "out_of_order"
    OTHER_TENSOR = "other_tensor"
    ALTERED = "altered"
    FOREIGN_RUN = "foreign_run"
    FOREIGN_CONFIG = "foreign_config"
    FOREIGN_ATTESTATION = "foreign_attestation"
    FOREIGN_PARTY = "foreign_party"
    FOREIGN_CHUNKING = "foreign_chunking"
    STALE_REPLY = "stale_reply"
    STALE_EPOCH = "stale_epoch"
    EXHAUSTED = "exhausted"
    CLOSED = "closed"
    FORKED = "forked"


VERSION = 1
TAG_BYTES = 16
_MAGIC = b"PHSF"
_FIXED = struct.Struct(">4sBB16sIQQIIIH")


class FrameHeader(NamedTuple):
    """The claims of a frame's header.

    Attributes:
        session: 16 bytes.
        counter: Counter of the first chunk.
        chunk_bytes: Plain bytes of each chunk but the last.
        chunks: Number of chunks, at least one.
        kind: Description of the tensor, encoded.
    """

    direction: int
    session: bytes
    epoch: int
    counter: int
    step: int
    microbatch: int
    chunk_bytes: int
    chunks: int
    kind: bytes

    def encode_header(self) -> bytes:
        """Return the bytes that begin the frame."""
        try:
            return _FIXED.pack(_MAGIC, VERSION, *self[:-1], len(self.kind)) + self.kind
        except struct.error as exc:
            raise SealError(
                SealRefusal.MALFORMED, f"step {self.step} or microbatch {self.microbatch}: no number"
            ) from exc


def parse_header(frame: memoryview) -> tuple[FrameHeader, int]:
    """Read the header of a frame without believing it.

    Returns:
        What it claims, and its length.
    """
    if frame.nbytes < _FIXED.size:
        raise SealError(
            SealRefusal.TRUNCATED, f"frame: {frame.nbytes} bytes, a header alone has {_FIXED.size} and more"
        )
    magic, version, *fields, kind_size = _FIXED.unpack_from(frame)
    if magic != _MAGIC:
        raise SealError(SealRefusal.MALFORMED, "frame: is no sealed frame")
    if version != VERSION:
        raise SealError(
            SealRefusal.OTHER_VERSION, f"frame: version {version}, expected {VERSION}; run the same release"
        )
    size = _FIXED.size + kind_size
    if frame.nbytes < size:
        raise SealError(SealRefusal.TRUNCATED, f"frame: {frame.nbytes} bytes, its header alone has {size}")
    return FrameHeader._make([*fields, bytes(frame[_FIXED.size : size])]), size


def header_size(kind: bytes) -> int:
    """Return the bytes of the header of a tensor with the description `kind`."""
    return _FIXED.size + len(kind)


def count_chunks(size_bytes: int, chunk_bytes: int) -> int:
    """Return how many chunks a tensor is cut into; an empty one has one, so that its header is authenticated."""
    return max(1, -(-size_bytes // chunk_bytes))
