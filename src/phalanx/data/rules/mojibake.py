"""Text that was once read in the wrong encoding."""

from typing import Literal

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Edit, Outcome, RuleReason, RuleSettings, import_library


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
