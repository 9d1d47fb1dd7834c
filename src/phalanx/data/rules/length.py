"""Documents that are too short or too long."""

from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings


class LengthConfig(RuleSettings):
    """Characters and words (between white spaces) of a document; a border is allowed itself."""

    kind: Literal["length"] = "length"
    least: int = Field(default=1, ge=0)
    most: int | None = Field(default=None, ge=1)
    least_words: int = Field(default=0, ge=0)
    most_words: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_length_limits(self) -> Self:
        for name, least, max_value in (("", self.least, self.most), ("_words", self.least_words, self.most_words)):
            if max_value is not None and max_value < least:
                raise ValueError(
                    f"most{name}={max_value} is below least{name}={least}, which drops everything; raise most{name}"
                )
        return self


class Length:
    """Drops by length alone."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config
        self._counts_words = config.least_words > 0 or config.most_words is not None

    def judge_page(self, page: Page) -> Outcome:
        """Drop documents outside of the limits."""
        config = self._config
        reason = _limit_reason("characters", len(page.text), config.least, config.most)
        if reason is None and self._counts_words:
            reason = _limit_reason("words", len(page.words), config.least_words, config.most_words)
        return Drop(reason) if reason else None


def _limit_reason(measure: str, size: int, least: int, most: int | None) -> RuleReason | None:
    if size < least:
        return RuleReason(measure, size, least)
    return RuleReason(measure, size, most) if most is not None and size > most else None
