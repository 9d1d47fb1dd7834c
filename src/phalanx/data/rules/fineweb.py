"""Documents with lines that differ from the lines of running text, by FineWeb's rules."""

from typing import Literal

from pydantic import Field

from phalanx.data.rules.gopher_repetition import repeated_parts
from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings
from phalanx.data.rules.term_table import SENTENCE_ENDS


class FineWebConfig(RuleSettings):
    """Borders of FineWeb's rule; a border is allowed itself."""

    kind: Literal["fineweb"] = "fineweb"
    min_ended_lines: float = Field(default=0.12, ge=0, le=1, alias="least_ended_lines")
    max_short_lines: float = Field(default=0.67, ge=0, le=1, alias="most_short_lines")
    short_line: int = Field(default=30, ge=0)
    max_repeated_characters: float = Field(default=0.01, ge=0, le=1, alias="most_repeated_characters")
    max_lines_per_term: float = Field(default=0.3, ge=0, alias="most_lines_per_term")


class FineWeb:
    """Drops by lines that end a sentence, short and repeated lines, and line ends by terms; empty lines do not count.

    Source: Penedo et al. 2024, section 3.6 (FineWeb's own filters).
    """

    def __init__(self, config: FineWebConfig) -> None:
        self._config = config

    def judge_page(self, page: Page) -> Outcome:
        """Drop a document at the first broken limit, which the reason names."""
        reason = self._drop_reason(page)
        return Drop(reason) if reason else None

    def _drop_reason(self, page: Page) -> RuleReason | None:
        config, text = self._config, page.text
        # a line of white space holds no sentence; the runs of line feeds are split away already
        lines = [row for row in page.filled_lines if row and not row.isspace()]
        if not lines:
            return RuleReason("lines", 0, 1)
        share = sum(row[-1] in SENTENCE_ENDS for row in lines) / len(lines)
        if share < config.min_ended_lines:
            return RuleReason("ended_lines", share, config.min_ended_lines)
        share = sum(len(row) <= config.short_line for row in lines) / len(lines)
        if share > config.max_short_lines:
            return RuleReason("short_lines", share, config.max_short_lines)
        line_feeds = text.count("\n")
        share = repeated_parts(lines)[1] / (len(text) - line_feeds)
        if share > config.max_repeated_characters:
            return RuleReason("repeated_line_characters", share, config.max_repeated_characters)
        share = line_feeds / len(page.terms)
        if share > config.max_lines_per_term:
            return RuleReason("lines_per_term", share, config.max_lines_per_term)
        return None
