"""Rules about characters: their normal form, wrong decoding, and the length of a document."""

import re
import unicodedata
from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.data.normal_form import to_nfc
from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Edit, Outcome, RuleReason, RuleSettings, import_library

_OTHER_LINE_ENDS = re.compile(r"\r\n?")
_SURROGATES = re.compile(r"[\ud800-\udfff]")


class UnicodeConfig(RuleSettings):
    """What of a text is made uniform; nothing is dropped."""

    kind: Literal["unicode"] = "unicode"
    line_ends: bool = True


class Unicode:
    """Edits to Unicode form NFC and line feeds; half of a surrogate pair, which no file can hold, becomes U+FFFD.

    NFC joins a letter and its accent where one character means both and changes no meaning; NFKC would. The form
    depends on the Unicode version of the interpreter for characters that are younger than it.

    Source: Unicode Standard Annex 15; SlimPajama (Soboleva et al. 2023) begins with it.
    """

    def __init__(self, config: UnicodeConfig) -> None:
        self._config = config

    def judge_page(self, page: Page) -> Outcome:
        """Edit, or let pass uniform text."""
        text, places = page.text, 0
        if self._config.line_ends and "\r" in text:
            text, places = _OTHER_LINE_ENDS.subn("\n", text)
        if not text.isascii():
            text, num_surrogates = _SURROGATES.subn("\ufffd", text)
            places += num_surrogates
            if not unicodedata.is_normalized("NFC", text):
                places += sum(not unicodedata.is_normalized("NFC", row) for row in text.split("\n"))
                text = to_nfc(text)
        return Edit(text, max(1, places), RuleReason("not_uniform", max(1, places))) if text != page.text else None


class MojibakeConfig(RuleSettings):
    """It has no settings: a line is repaired where it shows signs and a repair is sure."""

    kind: Literal["mojibake"] = "mojibake"


class Mojibake:
    """Restores lines with signs of mojibake (``cafÃ©``); a line without signs is never touched.

    The signs are ftfy's table of sequences that hardly any language writes; the repair is its ``fix_encoding`` and
    nothing else of it: quotes, widths and ligatures stay. Lines are looked at apart, as a document is often mixed.

    Source: Speer 2019, ftfy.
    """

    def __init__(self, config: MojibakeConfig) -> None:
        self._is_bad = import_library("ftfy.badness", config.kind).is_bad
        self._repair = import_library("ftfy", config.kind).fix_encoding

    def judge_page(self, page: Page) -> Outcome:
        """Edit the lines that can be repaired."""
        text = page.text
        if text.isascii() or not self._is_bad(text):
            return None
        lines = text.split("\n")
        repaired = [self._repair(row) if self._is_bad(row) else row for row in lines]
        places = sum(original != other for original, other in zip(lines, repaired, strict=True))
        return Edit("\n".join(repaired), places, RuleReason("lines_repaired", places)) if places else None


class LengthConfig(RuleSettings):
    """Characters and words (between white spaces) of a document; a border is allowed itself."""

    kind: Literal["length"] = "length"
    min_characters: int = Field(default=1, ge=0, alias="least")
    max_characters: int | None = Field(default=None, ge=1, alias="most")
    min_words: int = Field(default=0, ge=0, alias="least_words")
    max_words: int | None = Field(default=None, ge=1, alias="most_words")

    @model_validator(mode="after")
    def _check_length_limits(self) -> Self:
        for unit, min_value, max_value in (
            ("characters", self.min_characters, self.max_characters),
            ("words", self.min_words, self.max_words),
        ):
            if max_value is not None and max_value < min_value:
                raise ValueError(
                    f"max_{unit}={max_value} is below min_{unit}={min_value}, which drops everything; raise max_{unit}"
                )
        return self


class Length:
    """Drops by length alone."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config
        self._counts_words = config.min_words > 0 or config.max_words is not None

    def judge_page(self, page: Page) -> Outcome:
        """Drop documents outside of the limits."""
        config = self._config
        reason = _limit_reason("characters", len(page.text), config.min_characters, config.max_characters)
        if reason is None and self._counts_words:
            reason = _limit_reason("words", len(page.words), config.min_words, config.max_words)
        return Drop(reason) if reason else None


def _limit_reason(measure: str, size: int, min_size: int, max_size: int | None) -> RuleReason | None:
    if size < min_size:
        return RuleReason(measure, size, min_size)
    return RuleReason(measure, size, max_size) if max_size is not None and size > max_size else None
