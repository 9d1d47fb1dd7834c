"""The interface of a scan: findings in a text, and the place from which a growing text is undecided."""

from collections.abc import Iterator
from typing import Protocol

from phalanx.serve.filters.note import Finding

MAX_OPEN = 512
"""Maximum number of characters that a scan holds back as undecided."""
_VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
_NO_LOWER = "".join(character for character in _VISIBLE if not character.islower())
_BLANKS = " \t\n"
_MAX_NUMBER_WORDS = 16
_MAX_NUMBER_CHARACTERS = 64


class TextScan(Protocol):
    """Finds one sort of thing in a text.

    Attributes:
        trigger: Regular expression: a text without a match of it has no finding. Empty where any text may have one.
    """

    trigger: str

    def find(self, text: str, is_cut: bool) -> Iterator[Finding]:
        """Yield findings in order.

        Args:
            is_cut: The text goes on behind its end, and a finding that runs over the end counts.
        """
        ...

    def open_start(self, text: str) -> int:
        """Return the first place of a possible finding that further text must decide; the length if there is none."""
        ...


def open_word(text: str) -> int:
    """Return where the visible ASCII characters at the end of a text begin."""
    return len(text.rstrip(_VISIBLE))


def open_number(text: str) -> int:
    """Return where the last word begins, with the words without lower case before it: groups of a long number.

    The first group may stand directly behind letters, as in ``tel:+49 30``.
    """
    start = open_word(text)
    for _ in range(_MAX_NUMBER_WORDS):
        word_end = len(text[:start].rstrip(_BLANKS))
        if not word_end or start - word_end > 2 or len(text) - word_end > _MAX_NUMBER_CHARACTERS:
            break
        word_start = open_word(text[:word_end])
        letters = text[word_start:word_end].rstrip(_NO_LOWER)
        group = text[word_start + len(letters) : word_end]
        if not group or (letters and not any(map(str.isdigit, group))):
            break
        start = word_start + len(letters)
        if letters:
            break
    return start
