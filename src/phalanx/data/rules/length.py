"""Documents that are too short or too long."""

from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings


class LengthConfig(RuleSettings):
    """Characters of a document; a border is allowed itself."""

    kind: Literal["length"] = "length"
    least: int = Field(default=1, ge=0)
    most: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.most is not None and self.most < self.least:
            raise ValueError(f"most={self.most} is below least={self.least}, which drops everything; raise most")
        return self


class Length:
    """Drops by length alone."""

    def __init__(self, config: LengthConfig) -> None:
        self._config = config

    def judge(self, page: Page) -> Outcome:
        """Drop what is outside of the borders."""
        size, config = len(page.text), self._config
        if size < config.least:
            return Drop(RuleReason("characters", size, config.least))
        if config.most is not None and size > config.most:
            return Drop(RuleReason("characters", size, config.most))
        return None
