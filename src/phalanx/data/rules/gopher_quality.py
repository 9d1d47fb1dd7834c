"""Documents that do not read like prose, by Gopher's word statistics."""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings
from phalanx.data.rules.term_table import ALPHABETIC, SYMBOL, hash_term

_ELLIPSES = ("...", "…")
_BULLETS = ("•", "-")
Share = float


class GopherQualityConfig(RuleSettings):
    """Borders of Gopher's quality rule; a border is allowed itself."""

    kind: Literal["gopher_quality"] = "gopher_quality"
    min_words: int = Field(default=50, ge=0, alias="least_words")
    max_words: int = Field(default=100_000, ge=1, alias="most_words")
    min_mean_length: float = Field(default=3.0, ge=0, alias="least_mean_length")
    max_mean_length: float = Field(default=10.0, gt=0, alias="most_mean_length")
    max_symbols: Share = Field(default=0.1, ge=0, alias="most_symbols")
    max_bullet_lines: Share = Field(default=0.9, ge=0, le=1, alias="most_bullet_lines")
    max_ellipsis_lines: Share = Field(default=0.3, ge=0, le=1, alias="most_ellipsis_lines")
    min_alphabetic: Share = Field(default=0.8, ge=0, le=1, alias="least_alphabetic")
    min_stop_words: int = Field(default=2, ge=0, alias="least_stop_words")
    stop_words: tuple[str, ...] = ("the", "be", "to", "of", "and", "that", "have", "with")

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.min_words > self.max_words or self.min_mean_length > self.max_mean_length:
            raise ValueError("a minimum is above its maximum, which drops everything; raise max_* or lower min_*")
        if self.min_stop_words > len(set(self.stop_words)):
            raise ValueError(
                f"min_stop_words={self.min_stop_words}, but there are {len(set(self.stop_words))} stop_words"
            )
        return self


class GopherQuality:
    """Drops by number and length of words, symbols, bullets, ellipses, letters and stop words, in this order.

    Source: Rae et al. 2021, appendix A.1.1 (quality filtering).
    """

    def __init__(self, config: GopherQualityConfig) -> None:
        self._config = config
        self._stop_hashes = [np.uint64(hash_term(word)) for word in sorted(set(config.stop_words))]

    def judge_page(self, page: Page) -> Outcome:
        """Drop a document at the first broken limit, which the reason names."""
        reason = (
            self._judge_words(page)
            or self._judge_symbols(page)
            or self._judge_lines(page)
            or self._judge_language(page)
        )
        return Drop(reason) if reason else None

    def _judge_words(self, page: Page) -> RuleReason | None:
        config = self._config
        is_word = (page.term_bits & SYMBOL) == 0
        count = int(np.count_nonzero(is_word))
        if count < config.min_words:
            return RuleReason("words", count, config.min_words)
        if count > config.max_words:
            return RuleReason("words", count, config.max_words)
        mean = float(page.term_lengths[is_word].sum()) / count if count else 0.0
        if mean < config.min_mean_length:
            return RuleReason("mean_length", mean, config.min_mean_length)
        if mean > config.max_mean_length:
            return RuleReason("mean_length", mean, config.max_mean_length)
        return None

    def _judge_symbols(self, page: Page) -> RuleReason | None:
        max_share, terms = self._config.max_symbols, max(1, len(page.terms))
        for measure, signs in (("hashes", ("#",)), ("ellipses", _ELLIPSES)):
            share = sum(map(page.text.count, signs)) / terms
            if share > max_share:
                return RuleReason(measure, share, max_share)
        return None

    def _judge_lines(self, page: Page) -> RuleReason | None:
        config, lines, text = self._config, page.lines, page.text
        # a sign that is rarer than lines may be cannot break a border: most documents need no look at their lines
        if sum(map(text.count, _BULLETS)) > config.max_bullet_lines * len(lines):
            share = sum(row.lstrip().startswith(_BULLETS) for row in lines) / len(lines)
            if share > config.max_bullet_lines:
                return RuleReason("bullet_lines", share, config.max_bullet_lines)
        if sum(map(text.count, _ELLIPSES)) > config.max_ellipsis_lines * len(lines):
            share = sum(row.rstrip().endswith(_ELLIPSES) for row in lines) / len(lines)
            if share > config.max_ellipsis_lines:
                return RuleReason("ellipsis_lines", share, config.max_ellipsis_lines)
        return None

    def _judge_language(self, page: Page) -> RuleReason | None:
        config = self._config
        share = int(np.count_nonzero(page.term_bits & ALPHABETIC)) / max(1, len(page.terms))
        if share < config.min_alphabetic:
            return RuleReason("alphabetic", share, config.min_alphabetic)
        num_stop_words = 0
        hashes = page.term_grams(1)
        for stop_hash in self._stop_hashes:
            if num_stop_words >= config.min_stop_words:
                return None
            num_stop_words += bool((hashes == stop_hash).any())
        return (
            RuleReason("stop_words", num_stop_words, config.min_stop_words)
            if num_stop_words < config.min_stop_words
            else None
        )
