"""What ended a run that failed, for its summary: the kind, and the places in the code; never a value of a variable."""

import traceback
from pathlib import Path
from typing import Any

from phalanx.config import printable_text
from phalanx.errors import PhalanxError

_MAX_TEXT = 1000
_MAX_FRAMES = 16
_NO_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")


def describe_failure(exc: BaseException | None) -> dict[str, Any] | None:
    """Return kind, code, message and stack of the error that ended a run; None where none did.

    The message of an error that Phalanx does not raise on purpose is left out: it may quote a tensor or a text.
    """
    if exc is None or isinstance(exc, KeyboardInterrupt):
        return None
    root = exc
    while root.__cause__ is not None:
        root = root.__cause__
    is_own = isinstance(exc, PhalanxError)
    is_out_of_memory = any(_lacks_memory(error) for error in (exc, root))
    frames = traceback.extract_tb(root.__traceback__)[-_MAX_FRAMES:]
    return {
        "kind": type(exc).__name__,
        "code": exc.error_facts["code"] if isinstance(exc, PhalanxError) else None,
        "message": printable_text(str(exc), _MAX_TEXT) if is_own else None,
        "root": type(root).__name__,
        "errno": root.errno if isinstance(root, OSError) else None,
        "is_out_of_memory": is_out_of_memory,
        "stack": [f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in frames],
    }


def _lacks_memory(error: BaseException) -> bool:
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return is_named or (isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY))
