"""Words of the user's lists: how many a document has, and at which share it is left out."""

from collections import Counter
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.data.normal_form import to_nfc
from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings, Tag
from phalanx.data.rules.word_files import fold_case, is_whole_word, read_entries, search_all

OWN_WORDS = (
    "arsehole",
    "asshole",
    "bastard",
    "bitch",
    "bollocks",
    "bullshit",
    "cunt",
    "fuck",
    "fucking",
    "motherfucker",
)
"""A list for trying the rule out, English swear words alone; it is no filter of harm."""

_TOLD_WORDS = 5


class BadWordsConfig(RuleSettings):
    """Words and phrases, upper or lower case; a document is tagged, and dropped only beyond a threshold.

    Attributes:
        files: Lists, one word or phrase a line.
        own: Whether the few words that come with the rule count as well.
        max_share: Share of a document's words above which it is dropped; without it nothing is.
        min_hits: Hits below which nothing is dropped, whatever the share.
    """

    kind: Literal["bad_words"] = "bad_words"
    files: tuple[Path, ...] = ()
    own: bool = True
    max_share: float | None = Field(default=None, ge=0.0, le=1.0, alias="most")
    min_hits: int = Field(default=3, ge=1, alias="least_hits")

    @model_validator(mode="after")
    def _check_word_lists(self) -> Self:
        if not self.files and not self.own:
            raise ValueError("bad_words: own = false and no files give no words; name a file")
        return self


class BadWords:
    """Counts whole words of the lists in one pass; a listed phrase counts once."""

    def __init__(self, config: BadWordsConfig) -> None:
        default_words = OWN_WORDS if config.own else ()
        words = (*default_words, *read_entries(config.files))
        self._entries = sorted({fold_case(to_nfc(word)) for word in words})
        self._config, self._hits = config, search_all(self._entries, "bad_words")

    def judge_page(self, page: Page) -> Outcome:
        """Tag with the number of hits and their share of the words; drop beyond the threshold."""
        text = fold_case(to_nfc(page.text))
        counts = Counter(entry for entry, start, stop in self._hits(text) if is_whole_word(text, start, stop))
        hits, config = counts.total(), self._config
        if not hits:
            return None
        share = hits / max(len(page.words), hits)
        if config.max_share is not None and hits >= config.min_hits and share > config.max_share:
            often = sorted(counts, key=lambda entry: (-counts[entry], entry))[:_TOLD_WORDS]
            summary = ", ".join(f"{self._entries[entry]} {counts[entry]}" for entry in often)
            return Drop(RuleReason(f"bad_words ({summary})", round(share, 6), config.max_share))
        return Tag({"bad_words": hits, "bad_words_share": round(share, 6)})
