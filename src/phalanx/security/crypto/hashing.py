"""The one digest for messages, headers and log lines, and the one way to separate what is signed."""

import re
from collections.abc import Iterable

from blake3 import blake3

DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")


def digest_hex(*buffers: bytes | memoryview) -> str:
    """Return the BLAKE3-256, in 64 lowercase hex characters, over the concatenation of the buffers.

    Args:
        buffers: Read in place, without a copy; a memoryview must be contiguous.

    Guarantees:
        Runs in the calling thread only: how a run is timed does not depend on idle cores. Does not separate
        the buffers: ``("ab", "c")`` and ``("a", "bc")`` have the same digest.

    Source: O'Connor et al. 2020, BLAKE3: one function, fast everywhere.
    """
    return digest_one_by_one(buffers)


def digest_one_by_one(buffers: Iterable[bytes | memoryview]) -> str:
    """As `digest_hex`, of buffers that need not be in memory at the same time."""
    hasher = blake3()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.hexdigest()


def in_domain(domain: str, data: bytes) -> bytes:
    """Prefix what is about to be signed, so that a signature made for one purpose is void for another.

    Args:
        domain: Such as ``frame/1``; holds no NUL, so no two pairs (domain, data) give the same bytes.
        data: What is signed.
    """
    return b"phalanx/" + domain.encode("ascii") + b"\0" + data
