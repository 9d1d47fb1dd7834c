"""Canonical bytes, and digests over bytes."""

import json
import re
from typing import Any, NoReturn

from blake3 import blake3

from phalanx.config import canonical_json

MAX_DEPTH = 32
_MAX_INTEGER = 2**63 - 1


def parse_canonical(data: bytes, /) -> dict[str, Any]:
    """Parse one JSON object that must be written in the canonical way.

    The one form (sorted keys, no spaces, no double keys) means that equal data has one digest, and that two
    readers cannot understand the same signed bytes in two ways.

    Returns:
        The object. Integers fit in 64 bits, floats are finite, text is valid Unicode, and nothing is nested
        deeper than 32.

    Raises:
        ValueError: The bytes are anything else; the message says what. Callers turn it into their own error.
    """
    try:
        # as `JSONDecoder.decode`, without blanks around the value, which are not canonical
        text = data.decode("utf-8")
        value, stop = _DECODER.raw_decode(text)
        if stop != len(text):
            raise ValueError(f"JSON is followed by something else at character {stop}")
        # brackets inside text count as well, so this can only look too often
        if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
            _check_depth(value)
        if canonical_json(value) != data:
            raise ValueError("JSON is not in canonical form (sorted keys, no spaces, no double keys)")
    except RecursionError as exc:
        raise ValueError(f"JSON is nested deeper than {MAX_DEPTH}") from exc
    if not isinstance(value, dict):
        raise ValueError(f"JSON is a {type(value).__name__}, expected an object")  # noqa: TRY004
    return value


def _bounded_integer(text: str) -> int:
    # the length is looked at first: int() of a long text takes quadratic time
    if len(text) > 20 or not -_MAX_INTEGER <= (value := int(text)) <= _MAX_INTEGER:
        raise ValueError("JSON holds an integer of more than 64 bits")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"JSON holds {text}, which is no number")


def _check_depth(value: Any) -> None:
    layer, depth = [value], 0
    while layer:
        layer = [
            inner
            for outer in layer
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"JSON is nested deeper than {MAX_DEPTH}")


_DECODER = json.JSONDecoder(parse_int=_bounded_integer, parse_constant=_refuse_constant)


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
    hasher = blake3()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.hexdigest()


def in_domain(domain: str, data: bytes) -> bytes:
    """Prefix data before it is signed, so that a signature made for one purpose is void for another.

    Args:
        domain: Such as ``frame/1``; holds no NUL, so no two pairs (domain, data) give the same bytes.
    """
    return b"phalanx/" + domain.encode("ascii") + b"\0" + data
