"""Stacks of a party's threads, which its owner asks for when a run fails: places in code, and never a value."""

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import FrameError

MAX_STACKS_BYTES = 96 * 1024
_MAX_THREADS, _MAX_FRAMES, _MAX_LINE = 16, 24, 10_000_000
_MAX_WORD = 80
# names of Python and of files, and no other text: nothing that steers a terminal, is markup or ends a line
_PLACE = r"[A-Za-z0-9_.<>-]{1,80}"
Word = Annotated[str, StringConstraints(pattern=rf"\A{_PLACE}\z", max_length=_MAX_WORD)]


class StackFrame(StrictModel):
    """One place in code.

    Attributes:
        file: Name of the file, without its directories.
    """

    file: Word
    line: Annotated[int, Field(ge=0, le=_MAX_LINE)]
    function: Word


class ThreadStack(StrictModel):
    """The places of one thread, the outermost call first."""

    frames: Annotated[tuple[StackFrame, ...], Field(max_length=_MAX_FRAMES)]


class PartyStacks(StrictModel):
    """The stacks of a party's threads, the main thread's first: a claim that nobody can check."""

    threads: Annotated[tuple[ThreadStack, ...], Field(max_length=_MAX_THREADS)]

    def list_lines(self) -> list[str]:
        """Return a line for each place, and one above each thread."""
        lines: list[str] = []
        for number, thread in enumerate(self.threads):
            lines.append("main thread:" if number == 0 else f"thread {number + 1}:")
            lines += [f"  {frame.file}:{frame.line} {frame.function}" for frame in thread.frames]
        return lines


def describe_own_stacks() -> bytes:
    """Return the stacks of this process as bytes for `parse_stacks`; the thread that asks is left out."""
    main = threading.main_thread().ident
    frames = {key: frame for key, frame in sys._current_frames().items() if key != threading.get_ident()}
    order = sorted(frames, key=lambda key: key != main)
    threads: list[ThreadStack] = []
    for key in order:
        thread = _read_thread(frames[key])
        # threads of a pool that wait have one stack
        if thread not in threads and len(threads) < _MAX_THREADS:
            threads.append(thread)
    return canonical_json(PartyStacks(threads=tuple(threads)).model_dump(mode="json"))


def _read_thread(innermost: FrameType) -> ThreadStack:
    places: list[StackFrame] = []
    frame: FrameType | None = innermost
    while frame is not None and len(places) < _MAX_FRAMES:
        code = frame.f_code
        file, function = _as_word(Path(code.co_filename).name), _as_word(code.co_name)
        places.append(StackFrame(file=file, line=min(frame.f_lineno or 0, _MAX_LINE), function=function))
        frame = frame.f_back
    return ThreadStack(frames=tuple(reversed(places)))


def _as_word(text: str) -> str:
    word = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_.<>-") else "_" for letter in text)
    return word[:_MAX_WORD] or "_"


def parse_stacks(raw: bytes) -> PartyStacks:
    """Parse the stacks that another party sent.

    Raises:
        FrameError: They are too long, or hold anything but names of files and functions and numbers of lines.
    """
    if len(raw) > MAX_STACKS_BYTES:
        raise FrameError(f"stacks: {len(raw)} bytes, and at most {MAX_STACKS_BYTES} are taken")
    try:
        return PartyStacks.model_validate_json(raw)
    except ValidationError as exc:
        fault = exc.errors(include_input=False, include_url=False)[0]
        raise FrameError(f"stacks: {fault['type']} at {'.'.join(str(part) for part in fault['loc'])[:80]}") from exc
