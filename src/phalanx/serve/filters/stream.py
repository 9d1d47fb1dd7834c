"""A filter of a text that comes in pieces: its verdict does not depend on where the pieces are cut.

The text is judged in blocks at fixed places. A block is judged with the characters before it and behind it, as soon as
so many are there or the text has ended; a finding belongs to the block in which it begins. Release is a second matter:
a character goes out once no finding that refuses can begin at or before it, which in plain prose is at the end of its
word.
"""

import re
from collections.abc import Sequence

from phalanx.errors import DataError
from phalanx.serve.filters.note import FilterNote, TextRefused
from phalanx.serve.filters.scan import MAX_OPEN
from phalanx.serve.filters.table import ActiveFilter

BLOCK, BEHIND, AHEAD = 256, 128, MAX_OPEN
_CONTEXT = 256
"""Characters before those that are held: more than the longest run of training text that does not count."""


class NoteCounts:
    """Counts of findings that pass, by filter and kind."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, name: str, kind: str, start: int) -> None:
        """Count one finding."""
        count, first = self._counts.get((name, kind), (0, start))
        self._counts[name, kind] = count + 1, min(first, start)

    def notes(self) -> list[FilterNote]:
        """Return one note for each kind, in the order of their first findings' judgement."""
        return [
            FilterNote(filter=name, kind=kind, count=count, first=first)
            for (name, kind), (count, first) in self._counts.items()
        ]


class StreamFilter:
    """Filters one text that is written piece by piece.

    Guarantees:
        The pieces that come out, joined, are the text that went in, unchanged. Notes and refusal are equal to the whole
        text's, however it was cut. At most `BLOCK` + `AHEAD` characters are held back.
    """

    def __init__(self, filters: Sequence[ActiveFilter]) -> None:
        self._filters = filters
        self._refusing = [active.scan for active in filters if active.refuses]
        triggers = [scan.trigger for scan in self._refusing]
        self._trigger = re.compile("|".join(f"(?:{trigger})" for trigger in triggers)) if triggers else None
        self._counts = NoteCounts()
        self._text, self._base = "", 0
        self._judged = self._released = 0
        self._is_over = False

    @property
    def notes(self) -> list[FilterNote]:
        """What has passed with a note so far; complete after `close`."""
        return self._counts.notes()

    def feed(self, text: str) -> str:
        """Take the next piece; return what may be shown.

        Raises:
            TextRefused: A filter refuses; nothing further comes out.
        """
        self._check_going_on()
        self._text += text
        while self._end - self._judged > BLOCK + AHEAD:
            self._judge_block(self._judged + BLOCK)
        return self._release(self._find_clear_end()) if text else ""

    def close(self) -> str:
        """End the text; return the characters that were held back."""
        self._check_going_on()
        while self._judged < self._end:
            self._judge_block(min(self._judged + BLOCK, self._end))
        self._is_over = True
        return self._release(self._end)

    @property
    def _end(self) -> int:
        return self._base + len(self._text)

    def _check_going_on(self) -> None:
        if self._is_over:
            raise DataError("this text is over: it was closed or refused")

    def _judge_block(self, block_end: int) -> None:
        """Judge the findings that begin in the next block."""
        window_start = max(self._base, self._judged - BEHIND)
        window_end = min(block_end + AHEAD, self._end)
        window = self._text[window_start - self._base : window_end - self._base]
        for active in self._filters:
            for finding in active.scan.find(window, window_end < self._end):
                start = window_start + finding.start
                if not self._judged <= start < block_end:
                    continue
                if active.refuses:
                    self._is_over = True
                    raise TextRefused(active.name, f"{finding.kind} at character {start}")
                self._counts.add(active.name, finding.kind, start)
        self._judged = block_end

    def _find_clear_end(self) -> int:
        """Return up to where nothing that refuses can begin."""
        clear_end = self._end
        if self._trigger is None:
            return clear_end
        held = self._text[self._released - self._base :]
        tail_start = max(self._base, self._released, self._end - MAX_OPEN)
        tail = self._text[tail_start - self._base :]
        for scan in self._refusing:
            clear_end = min(clear_end, tail_start + scan.open_start(tail))
        if self._trigger.search(held):
            context = max(self._base, self._released - _CONTEXT)
            for scan in self._refusing:
                for finding in scan.find(self._text[context - self._base :], True):
                    if context + finding.end > self._released:
                        clear_end = min(clear_end, context + finding.start)
                        break
        return max(clear_end, self._judged)

    def _release(self, clear_end: int) -> str:
        start = self._released
        self._released = max(start, clear_end)
        piece = self._text[start - self._base : self._released - self._base]
        base = max(self._base, min(self._released - _CONTEXT, self._judged - BEHIND))
        self._text, self._base = self._text[base - self._base :], base
        return piece
