"""Scans of single characters: controls, forms of a letter, and what no person sees."""

import re
import unicodedata
from collections.abc import Iterator

from phalanx.data.scan.hidden_characters import find_hidden
from phalanx.serve.filters.note import Finding

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f]")
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]{0,64}[ -/]{0,16}[@-~]?|[\]PX^_][^\x07\x1b\x9c]{0,256}|.?)|[\x80-\x84\x86-\x9f]", re.S
)
_HIDDEN_TRIGGER = "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164"
_HIDDEN_TRIGGER += "\ufe00-\ufe0f\ufeff\uffa0\ufff9-\ufffb\U000e0000-\U000e01ef]"
_TRAILING_HIDDEN = re.compile(f"(?:.|^){_HIDDEN_TRIGGER}{{1,64}}\\Z|\u00ad.\\Z", re.S)


class ControlCharacters:
    """Control characters other than tab, line ends and form feed."""

    trigger = _CONTROLS.pattern

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name the kind ``escape`` for terminal sequences, ``control`` for all others."""
        del is_cut
        last = 0
        for match in _CONTROLS.finditer(text):
            if match.start() >= last:
                escape = _ESCAPE.match(text, match.start())
                last = escape.end() if escape else match.end()
                yield Finding("escape" if escape else "control", match.start(), last)

    def open_start(self, text: str) -> int:
        """A control character is decided at once."""
        return len(text)


class HiddenText:
    """Characters that no person sees and a model reads, outside of the uses that writing has for them.

    Args:
        lone: Look for lone zero-width characters, which stand in pages by mistake; otherwise for all others.
        balance: Compare embeddings of whole lines; not in pieces of a stream.
    """

    trigger = _HIDDEN_TRIGGER

    def __init__(self, *, lone: bool, balance: bool) -> None:
        self._lone, self._balance = lone, balance

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name the measure of the data scan ``hidden_characters``."""
        del is_cut
        for measure, start, end in find_hidden(text, balance=self._balance):
            if (measure == "zero_width") == self._lone:
                yield Finding(measure, start, end)

    def open_start(self, text: str) -> int:
        """What stands behind a hidden character may give it a use."""
        match = _TRAILING_HIDDEN.search(text, max(0, len(text) - 65))
        return match.start() if match else len(text)


class NormalForm:
    """Text that is not in the Unicode form NFC: one letter may have several spellings."""

    trigger = "[^\x00-\x7f]"

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Yield one finding for each line."""
        del is_cut
        start = 0
        for line in [] if unicodedata.is_normalized("NFC", text) else text.split("\n"):
            if not unicodedata.is_normalized("NFC", line):
                yield Finding("not_nfc", start, start + len(line))
            start += len(line) + 1

    def open_start(self, text: str) -> int:
        """Only inputs are looked at, which are whole."""
        return len(text)


def find_broken_character(text: str) -> Finding | None:
    """Return the first half of a surrogate pair or noncharacter: no valid UTF-8 text for interchange has one."""
    match = None if text.isascii() else re.search("[\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]", text)
    return (
        Finding("surrogate" if "\ud800" <= match[0] <= "\udfff" else "noncharacter", *match.span()) if match else None
    )
