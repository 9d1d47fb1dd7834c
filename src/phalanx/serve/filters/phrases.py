"""Scans for listed phrases, orders to models and special tokens."""

import bisect
import re
from collections.abc import Iterator, Sequence

from phalanx.data.rules.word_files import fold_case, is_whole_word, search_all
from phalanx.data.scan.homoglyphs import LOOK_ALIKES
from phalanx.data.scan.instructions_in_text import InstructionsInText, InstructionsInTextConfig
from phalanx.errors import DataError
from phalanx.serve.filters.note import Finding

MAX_PHRASE_CHARACTERS = 256
_LATIN = str.maketrans(dict(LOOK_ALIKES))
_WIDE = str.maketrans("＜＞｜［］＿", "<>|[]_")
_BLANK = re.compile(r"\s")
_CHAT_MARKUP = re.compile(r"<\|[^|<>\n]{1,48}\|>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>")


class Phrases:
    """Words and phrases of the user's lists: whole words, in any case, with look-alike letters read as Latin ones.

    Args:
        kind: Kind of the findings, and name of the filter in messages.
        phrases: Entries of the user's lists, in any order.

    Raises:
        DataError: An entry is longer than a stream can hold back.

    Attributes:
        entries: The same in plain letters, sorted, each one once.
    """

    trigger = ""

    def __init__(self, kind: str, phrases: Sequence[str]) -> None:
        entries = sorted({_plain(phrase) for phrase in phrases})
        for entry in entries:
            if len(entry) > MAX_PHRASE_CHARACTERS:
                raise DataError(
                    f"{kind}: an entry of {len(entry)} characters; at most {MAX_PHRASE_CHARACTERS}: cut the list"
                )
        self._kind, self.entries, self._hits = kind, entries, search_all(entries, kind)
        self._longest = max(map(len, entries))

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Yield each entry that stands in the text as words of its own."""
        del is_cut
        for _, start, end in self.find_entries(text):
            yield Finding(self._kind, start, end)

    def find_entries(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield the index, start and end of each entry that stands in the text as words of its own."""
        plain = _plain(text)
        for index, start, end in self._hits(plain):
            if is_whole_word(plain, start, end):
                yield index, start, end

    def find_index(self, phrase: str) -> int:
        """Return the index of one of the user's phrases among `entries`."""
        return bisect.bisect_left(self.entries, _plain(phrase))

    def open_start(self, text: str) -> int:
        """Return the first place of the last characters from which on the text is the beginning of an entry."""
        begin = max(0, len(text) - self._longest - 1)
        plain = _plain(text[begin:])
        for place in range(len(plain)):
            # entries begin at the beginning of a word; scripts without spaces have none
            if place and plain[place - 1].isalnum() and plain[place].isascii():
                continue
            rest = plain[place:]
            index = bisect.bisect_left(self.entries, rest)
            if index < len(self.entries) and self.entries[index].startswith(rest):
                return begin + place
        return len(text)


def _plain(text: str) -> str:
    return _BLANK.sub(" ", fold_case(text).translate(_LATIN))


class Orders:
    """Orders to a model, in the forms of the data scan ``instructions_in_text``; English."""

    trigger = ""

    def __init__(self) -> None:
        self._scan = InstructionsInText(InstructionsInTextConfig())

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name ``order``; an address to a model without an order is none."""
        del is_cut
        return (Finding("order", start, end) for kind, start, end in self._scan.find(text) if kind.weight > 1)

    def open_start(self, text: str) -> int:
        """Only inputs are looked at, which are whole."""
        return len(text)


class SpecialTokens:
    """Text that a tokenizer or a chat template could read as the border of a turn.

    Args:
        tokens: Special tokens of the model.
    """

    trigger = ""

    def __init__(self, tokens: Sequence[str]) -> None:
        parts = [re.escape(token.translate(_WIDE)) for token in sorted(set(tokens), key=len, reverse=True) if token]
        self._pattern = re.compile("|".join([*parts, _CHAT_MARKUP.pattern]))

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Name ``special_token``; full-width brackets and bars count as plain ones."""
        del is_cut
        return (Finding("special_token", *match.span()) for match in self._pattern.finditer(text.translate(_WIDE)))

    def open_start(self, text: str) -> int:
        """Only inputs are looked at, which are whole."""
        return len(text)
