"""The leaves under the Merkle roots of the audit log: one file beside it, one JSON object a line."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx.closing import Closeable
from phalanx.errors import AuditLogError, DiskError
from phalanx.security.audit.line import LogEntry
from phalanx.security.crypto import DIGEST_PATTERN, digest_hex

_LEAF, _NODE = b"\x00", b"\x01"


def merkle_root(leaves: Sequence[bytes]) -> str:
    """Return the root, in 64 lowercase hex characters, of the tree over these leaves in this order.

    A leaf's digest is BLAKE3 over ``00`` and its bytes, a node's over ``01`` and its two children, so no leaf can
    pass for a node. A tree of n > 1 leaves has the first k in its left part, k being the largest power of two
    below n. The tree of no leaves is the digest of nothing.

    Source: RFC 6962, section 2.1, with BLAKE3 in the place of SHA-256.
    """
    return _merkle_root([bytes.fromhex(digest_hex(_LEAF, leaf)) for leaf in leaves]).hex()


def _merkle_root(digests: Sequence[bytes]) -> bytes:
    if not digests:
        return bytes.fromhex(digest_hex())
    if len(digests) == 1:
        return digests[0]
    split = 1 << ((len(digests) - 1).bit_length() - 1)
    return bytes.fromhex(digest_hex(_NODE, _merkle_root(digests[:split]), _merkle_root(digests[split:])))


LEAVES_FILE = "steps.jsonl"
STEP = "step"
"""Kind of the events that name leaves."""

MAX_BATCH_BYTES = 64 * 1024 * 1024
_MAX_OFFSET = 2**62


@dataclass(frozen=True)
class LeafBatch:
    """Leaves that were written together, as a line of the audit log names them.

    Attributes:
        root: Root of the Merkle tree over the leaves.
        offset: Byte offset of the first leaf in the file.
    """

    root: str
    leaves: int
    offset: int
    size_bytes: int

    @classmethod
    def from_log_entry(cls, line: LogEntry) -> Self:
        """Read what an event says."""
        root, counts = line.body.get("root"), [line.body.get(name) for name in ("leaves", "offset", "size_bytes")]
        good = [count for count in counts if type(count) is int and 0 <= count <= _MAX_OFFSET]
        if not isinstance(root, str) or DIGEST_PATTERN.fullmatch(root) is None or len(good) < len(counts):
            raise AuditLogError(f"line {line.head.num_events}: names no leaves")
        return cls(root, *good)


class LeafFile(Closeable):
    """An append-only file of leaves.

    Args:
        size_bytes: End of the last batch that the audit log names. Bytes behind it were being written when the process
            died, and are cut off at the next write.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._fd).st_size
        except OSError as exc:
            raise DiskError(f"{path}: cannot be opened ({exc.strerror})") from exc
        if size < size_bytes:
            os.close(self._fd)
            raise AuditLogError(f"{path}: has {size} bytes, the audit log names {size_bytes}; put the whole file back")
        self._size_bytes = size_bytes

    def append_leaves(self, leaves: Sequence[bytes]) -> LeafBatch:
        """Write leaves; the line of the audit log that names them comes after.

        Raises:
            DiskError: The disk refuses; the file is then as it was before.
        """
        data = b"".join(leaf + b"\n" for leaf in leaves)
        if len(data) > MAX_BATCH_BYTES:
            raise AuditLogError(f"{self._path}: {len(data)} bytes at once, at most {MAX_BATCH_BYTES} are allowed")
        if self._fd < 0:
            raise AuditLogError(f"{self._path}: is closed")
        offset = self._size_bytes
        try:
            if os.fstat(self._fd).st_size > offset:
                os.ftruncate(self._fd, offset)
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as exc:
            os.ftruncate(self._fd, offset)
            raise DiskError(f"{self._path}: cannot be written ({exc.strerror})") from exc
        self._size_bytes += len(data)
        return LeafBatch(merkle_root(leaves), len(leaves), offset, len(data))

    def sync_leaves(self) -> None:
        """Force all leaves to disk."""
        try:
            os.fsync(self._fd)
        except OSError as exc:
            raise DiskError(f"{self._path}: cannot be forced to disk ({exc.strerror})") from exc

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_batch(path: Path, batch: LeafBatch) -> list[bytes]:
    """Read the leaves that a line of the audit log names."""
    if not 0 <= batch.size_bytes <= MAX_BATCH_BYTES or batch.offset < 0:
        raise AuditLogError(f"{path}: {batch.size_bytes} bytes at {batch.offset} are no batch of leaves")
    try:
        with path.open("rb") as file:
            file.seek(batch.offset)
            data = file.read(batch.size_bytes)
    except OSError as exc:
        raise AuditLogError(f"{path}: cannot be read ({exc.strerror})") from exc
    if len(data) < batch.size_bytes:
        raise AuditLogError(f"{path}: ends after {batch.offset + len(data)} bytes, before its leaves do")
    leaves = data.split(b"\n")
    if leaves.pop() or len(leaves) != batch.leaves or merkle_root(leaves) != batch.root:
        raise AuditLogError(f"{path}: the leaves are not those whose root is in the audit log")
    return leaves
