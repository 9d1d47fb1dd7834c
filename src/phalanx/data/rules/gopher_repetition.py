"""Documents that say the same again, by Gopher's repetition statistics."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings

_TOP = range(2, 5)
_REPEATED = range(5, 11)


class GopherRepetitionConfig(RuleSettings):
    """Shares of a document that may be repetitions; a border is allowed itself.

    `max_top_grams` are characters in the most frequent 2-, 3- and 4-gram; `max_repeated_grams` those in repeated 5-
    to 10-grams.
    """

    kind: Literal["gopher_repetition"] = "gopher_repetition"
    max_paragraphs: float = Field(default=0.3, ge=0, le=1, alias="most_paragraphs")
    max_paragraph_characters: float = Field(default=0.2, ge=0, le=1, alias="most_paragraph_characters")
    max_lines: float = Field(default=0.3, ge=0, le=1, alias="most_lines")
    max_line_characters: float = Field(default=0.2, ge=0, le=1, alias="most_line_characters")
    max_top_grams: tuple[float, float, float] = Field(default=(0.20, 0.18, 0.16), alias="most_top_grams")
    max_repeated_grams: tuple[float, float, float, float, float, float] = Field(
        (0.15, 0.14, 0.13, 0.12, 0.11, 0.10), alias="most_repeated_grams"
    )


class GopherRepetition:
    """Drops by repeated paragraphs and lines, then by frequent and repeated n-grams of terms.

    Source: Rae et al. 2021, appendix A.1.1 and table A1 (repetition removal).
    """

    def __init__(self, config: GopherRepetitionConfig) -> None:
        self._config = config

    def judge_page(self, page: Page) -> Outcome:
        """Drop a document at the first broken limit, which the reason names; an empty document repeats nothing."""
        if not page.text:
            return Drop(RuleReason("characters", 0, 1))
        reason = self._judge_repeated_parts(page) or self._judge_top_grams(page) or self._judge_repeated_grams(page)
        return Drop(reason) if reason else None

    def _judge_repeated_parts(self, page: Page) -> RuleReason | None:
        config, size = self._config, len(page.text)
        for measure, parts, max_share, max_character_share in (
            ("paragraph", page.paragraphs, config.max_paragraphs, config.max_paragraph_characters),
            ("line", page.filled_lines, config.max_lines, config.max_line_characters),
        ):
            count, characters = repeated_parts(parts)
            if count / len(parts) > max_share:
                return RuleReason(f"repeated_{measure}s", count / len(parts), max_share)
            if characters / size > max_character_share:
                return RuleReason(f"repeated_{measure}_characters", characters / size, max_character_share)
        return None

    def _judge_top_grams(self, page: Page) -> RuleReason | None:
        size = len(page.text)
        for length, max_share in zip(_TOP, self._config.max_top_grams, strict=True):
            characters = top_gram_characters(page, length, max_share * size)
            if characters > max_share * size:
                return RuleReason(f"top_{length}_gram", characters / size, max_share)
        return None

    def _judge_repeated_grams(self, page: Page) -> RuleReason | None:
        size, borders = len(page.text), self._config.max_repeated_grams
        # what lies in a repeated 10-gram lies in a repeated 5-gram: if all these together break no border, nothing does
        if _covered_by_repeats(page, _REPEATED[0]) <= min(borders) * size:
            return None
        for length, max_share in zip(_REPEATED, borders, strict=True):
            if _covered_by_repeats(page, length) <= max_share * size:
                continue
            share = repeated_gram_characters(page, length) / size
            if share > max_share:
                return RuleReason(f"repeated_{length}_grams", share, max_share)
        return None


def repeated_parts(parts: Sequence[str]) -> tuple[int, int]:
    """How many parts are equal to one before, and the characters in these."""
    different = set(parts)
    if len(different) == len(parts):
        return 0, 0
    return len(parts) - len(different), sum(map(len, parts)) - sum(map(len, different))


def top_gram_characters(page: Page, length: int, border: float = 0.0) -> int:
    """Characters in all occurrences of the most frequent n-gram, one space between terms; of several the first.

    Where even the longest n-gram as often as the most frequent one would not come to more than the `border`, the answer
    is 0: which n-gram it is need not be looked for.
    """
    grams = page.term_grams(length)
    if not len(grams):
        return 0
    sizes = page.term_ends[length:] - page.term_ends[:-length] + (length - 1)
    inorder = np.sort(grams)
    starts = np.flatnonzero(np.concatenate(([True], inorder[1:] != inorder[:-1])))
    counts = np.diff(starts, append=len(grams))
    max_count = int(counts.max())
    if max_count * int(sizes.max()) <= border:
        return 0
    first = int(np.isin(grams, inorder[starts[counts == max_count]]).argmax()) if max_count > 1 else 0
    return int(sizes[first]) * max_count


def _repeated_groups(grams: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Places of all n-grams that occur more than once, sorted by n-gram; the group of each; which are not its first."""
    order = np.argsort(grams)
    inorder = grams[order]
    same = inorder[1:] == inorder[:-1]
    shared = np.zeros(len(grams), bool)
    shared[1:] |= same
    shared[:-1] |= same
    places, values = order[shared], inorder[shared]
    if not len(places):
        return places, places, np.zeros(0, bool)
    begins = np.concatenate(([True], values[1:] != values[:-1]))
    groups = np.cumsum(begins) - 1
    firsts = np.minimum.reduceat(places, np.flatnonzero(begins))
    return places, groups, places != firsts[groups]


def _covered_by_repeats(page: Page, length: int) -> int:
    """Characters that lie in some n-gram that occurred before: never fewer than `repeated_gram_characters`."""
    places, _, is_later = _repeated_groups(page.term_grams(length))
    if not len(places):
        return 0
    later = places[is_later]
    depth = np.zeros(len(page.terms) + 1, np.int64)
    depth[later] += 1
    depth[later + length] -= 1
    return int(page.term_lengths[np.cumsum(depth[:-1]) > 0].sum())


def repeated_gram_characters(page: Page, length: int) -> int:
    """Characters in n-grams that were seen before; after each the search goes on behind it.

    An n-gram counts as seen where the search began at it, so one inside of a repetition does not.
    """
    places, groups, _ = _repeated_groups(page.term_grams(length))
    order = np.argsort(places)
    ends = page.term_ends
    seen: set[int] = set()
    characters = resume_at = 0
    for place, group in zip(places[order].tolist(), groups[order].tolist(), strict=True):
        if place < resume_at:
            continue
        if group in seen:
            characters += int(ends[place + length] - ends[place])
            resume_at = place + length
        seen.add(group)
    return characters
