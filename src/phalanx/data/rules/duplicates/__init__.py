"""Rules that compare documents with each other: a text, or a part of one, that stood before."""

from phalanx.data.rules.duplicates.near_duplicates import (
    NearDuplicates as NearDuplicates,
    NearDuplicatesConfig as NearDuplicatesConfig,
)
from phalanx.data.rules.duplicates.paragraph_duplicates import (
    ParagraphDuplicates as ParagraphDuplicates,
    ParagraphDuplicatesConfig as ParagraphDuplicatesConfig,
)
from phalanx.data.rules.duplicates.repeated_substrings import (
    RepeatedSubstrings as RepeatedSubstrings,
    RepeatedSubstringsConfig as RepeatedSubstringsConfig,
)
import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal
from phalanx.data.normal_form import to_nfc
from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings, Texts


class ExactDuplicatesConfig(RuleSettings):
    """It has no settings: of equal texts the first in the order of sources stays."""

    kind: Literal["exact_duplicates"] = "exact_duplicates"


class ExactDuplicates:
    """Drops each document with the text of an earlier one, by SHA-256 of its NFC form.

    Source: Lee et al. 2022, section 4 (exact matching); 32 bytes of memory a document, and a table of them.
    """

    def __init__(self, config: ExactDuplicatesConfig) -> None:
        self._config = config

    def mark_page(self, page: Page) -> bytes:
        """The digest of the text."""
        return hashlib.sha256(to_nfc(page.text).encode("utf-8", "surrogatepass")).digest()

    def decide_outcomes(self, marks: Iterable[bytes], texts: Texts) -> Iterator[tuple[int, Outcome]]:
        """Drop the later documents; the reason names the first, which stays."""
        first: dict[bytes, int] = {}
        for number, digest in enumerate(marks):
            first_number = first.setdefault(digest, number)
            if first_number != number:
                yield number, Drop(RuleReason("equal_to", texts.read_page(first_number).document.name))
