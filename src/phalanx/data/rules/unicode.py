"""One form of every character, and one kind of line end."""

import re
import unicodedata
from typing import Literal

from phalanx.data.normal_form import to_nfc
from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Edit, Outcome, RuleReason, RuleSettings

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
