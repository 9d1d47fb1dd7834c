"""Documents that change between languages."""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from phalanx.data.rules.language import first_detector
from phalanx.data.rules.page import Page
from phalanx.data.rules.rule import Drop, Outcome, RuleReason, RuleSettings


class LanguageMixingConfig(RuleSettings):
    """How much of a document may be in other languages than its main one.

    It is looked at in parts of whole lines with at least `part_characters`; of a long document `max_parts`, evenly
    spread. A part in a language that is not sure counts for no language.
    """

    kind: Literal["language_mixing"] = "language_mixing"
    max_other: float = Field(default=0.3, ge=0, le=1, alias="most_other")
    part_characters: int = Field(default=200, ge=50)
    max_parts: int = Field(default=16, ge=2, alias="most_parts")
    min_score: float = Field(default=0.65, ge=0, le=1, alias="least_score")


class LanguageMixing:
    """Drops a document with too much text in other languages than its main one: half-translated pages, word lists.

    Source: our own rule, on fastText's language model (Joulin et al. 2017).
    """

    def __init__(self, config: LanguageMixingConfig) -> None:
        self._config = config
        self._detect = first_detector(config.kind, config.part_characters)

    def judge_page(self, page: Page) -> Outcome:
        """Drop by the share of characters in other languages."""
        config = self._config
        parts = list(_cut_parts(page.filled_lines, config.part_characters))
        if len(parts) > config.max_parts:
            last = len(parts) - 1
            parts = [parts[number * last // (config.max_parts - 1)] for number in range(config.max_parts)]
        characters: Counter[str] = Counter()
        for part in parts:
            code, score = self._detect(part)
            if score >= config.min_score:
                characters[code] += len(part)
        total = characters.total()
        if not total:
            return None
        other = 1 - max(characters.values()) / total
        return Drop(RuleReason("other_languages", other, config.max_other)) if other > config.max_other else None


def _cut_parts(lines: list[str], least: int) -> Iterator[str]:
    """Yield runs of whole lines with enough characters; one before a long line, and the last one, may have fewer."""
    run: list[str] = []
    size = 0
    for row in lines:
        if run and (size >= least or len(row) >= least):
            yield "\n".join(run)
            run, size = [], 0
        run.append(row)
        size += len(row) + 1
    if size > 1:
        yield "\n".join(run)
