"""Words with letters of another script that look like Latin ones: they pass filters of words and mark triggers."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Outcome
from phalanx.data.scan.word_stream import ScanSettings, describe_place, outcome_of

_PAIRS = (
    # Cyrillic
    ("АВЕКМНОРСТУХЅІЈԌԚԜ", "ABEKMHOPCTYXSIJGQW"),
    ("асеорухѕіјһԁԛԝѵӏ", "aceopyxsijhdqwvl"),
    # Greek; lower-case alpha, nu, rho and others stand beside Latin letters in formulas and are left out
    ("ΑΒΕΖΗΙΚΜΝΟΡΤΥΧ", "ABEZHIKMNOPTYX"),
    ("ο", "o"),
    # Armenian
    ("օսհոզ", "ouhnq"),
)
LOOK_ALIKES: Mapping[str, str] = MappingProxyType(
    {character: latin for others, latins in _PAIRS for character, latin in zip(others, latins, strict=True)}
)
"""Letters of other scripts and the Latin one that most fonts draw the same; a part of Unicode's table (UTS 39)."""

_OTHERS = "".join(LOOK_ALIKES)
_MIXED = re.compile(f"[A-Za-z](?=[{_OTHERS}])|[{_OTHERS}](?=[A-Za-z])")
_STYLED = re.compile("[\U0001d400-\U0001d7cb]{4,}")
_LETTERS_AROUND = 40
_MIN_LETTERS = 4


class HomoglyphsConfig(ScanSettings):
    """Words that mix Latin letters with look-alikes of Cyrillic, Greek or Armenian, or are set in mathematical letters.

    Attributes:
        max_words: Such words that a document may have.
    """

    kind: Literal["homoglyphs"] = "homoglyphs"
    max_words: int = Field(default=0, ge=0, alias="most")


class Homoglyphs:
    """Sets aside documents with words that look Latin and are not.

    Guarantees:
        Finds words of four letters and more in which at least one letter is a look-alike and all others are Latin.
        Does not find a word that is wholly of another script, letters outside of the table, or words that mix
        scripts openly: a Latin stem with a Cyrillic ending is how people write.
    """

    def __init__(self, config: HomoglyphsConfig) -> None:
        self._config = config

    def judge_page(self, page: Page) -> Outcome:
        """State the number of words, the first one's place, and its look-alike."""
        text, count, first = page.text, 0, None
        if text.isascii():
            return None
        last = 0
        for match in _MIXED.finditer(text):
            if match.start() < last:
                continue
            start, last = _word_around(text, match.start())
            if _looks_latin(text[start:last]):
                count += 1
                first = first or (start, last)
        for match in _STYLED.finditer(text):
            count += 1
            first = first or match.span()
        if first is None or count <= self._config.max_words:
            return None
        start, stop = first
        codes = " ".join(f"U+{ord(character):04X}" for character in text[start:stop] if not character.isascii())[
            :_LETTERS_AROUND
        ]
        location = describe_place(text, start, stop)
        return outcome_of(
            self._config, "homoglyphs", f"{count}; first {location}, with {codes}", self._config.max_words
        )


def _word_around(text: str, at: int) -> tuple[int, int]:
    start = stop = at
    while start > max(at - _LETTERS_AROUND, 0) and text[start - 1].isalpha():
        start -= 1
    while stop < min(at + _LETTERS_AROUND, len(text)) and text[stop].isalpha():
        stop += 1
    return start, stop


def _looks_latin(word: str) -> bool:
    latin = sum(letter.isascii() for letter in word)
    others = sum(letter in LOOK_ALIKES for letter in word)
    # one capital beside a few Latin letters is a unit or a symbol
    return len(word) >= _MIN_LETTERS and latin >= 2 and others >= 1 and latin + others == len(word)
