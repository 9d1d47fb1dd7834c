"""Files of a run directory as somebody opens them who does not trust it."""

import errno
import json
import math
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

_MAX_DEPTH = 64
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_DIGITS = 18


def open_run_file(path: Path) -> BinaryIO:
    """Open a file of a run directory for reading.

    Raises:
        OSError: There is none, or in its place is a link, pipe, device or directory: a run directory from somebody else
            could show a file of this machine as a log of its own, or make the reader wait for ever.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(handle, "rb")


def parse_row(text: bytes) -> dict[str, Any] | None:
    """Return a JSON object as a run writes it; None for anything else.

    Guarantees:
        Every number is finite and below 10^18 if it is whole; another one is None, as JSON has no word for it. No text
        has half a surrogate pair, and nothing is nested more than 64 deep, so that what reads it can print it.
    """
    try:
        value = _DECODER.decode(text.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and _is_shallow(value) and not _SURROGATE.search(text) else _repair(value)


def _repair(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not _is_shallow(value):
        return None
    # an escaped emoji is a whole pair; half of one becomes a question mark
    repaired = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return dict(_DECODER.decode(repaired.decode()))


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for branch in level
            for item in (branch.values() if isinstance(branch, dict) else branch)
            if isinstance(item, dict | list)
        ]
        if not level:
            return True
    return False


def _parse_float(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _parse_whole(text: str) -> int | None:
    return int(text) if len(text) <= _MAX_DIGITS else None


_DECODER = json.JSONDecoder(parse_float=_parse_float, parse_int=_parse_whole, parse_constant=lambda _: None)
