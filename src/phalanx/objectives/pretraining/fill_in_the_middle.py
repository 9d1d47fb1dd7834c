"""Fill in the middle: a document's middle is moved behind its end, so that it is predicted from both sides."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from phalanx.objectives.objective import ObjectiveSettings
from phalanx.objectives.pretraining.rewriting import Draw, Row, RowPlace, Tokens, TokenTable, fitted_row, text_of


class FillInTheMiddleSettings(ObjectiveSettings):
    """The share of documents that are turned round, and their orders.

    Attributes:
        rate: Share of the documents; the others are learned from left to right.
        spm: Share of these with the suffix first (SPM); the rest has the prefix first (PSM).
    """

    rate: float = Field(default=0.5, ge=0.0, le=1.0, allow_inf_nan=False)
    spm: float = Field(default=0.5, ge=0.0, le=1.0, allow_inf_nan=False)
    prefix_token: str = Field(default="<fim_prefix>", min_length=1, max_length=100)
    suffix_token: str = Field(default="<fim_suffix>", min_length=1, max_length=100)
    middle_token: str = Field(default="<fim_middle>", min_length=1, max_length=100)


@dataclass(frozen=True)
class MiddleRows:
    """A rewriting of each document of a row by itself, which is then cut to the row's length.

    PSM is ``<prefix> prefix <suffix> suffix <middle> middle``, SPM ``<prefix> <suffix> suffix <middle> prefix middle``,
    as both are trained together. The two cuts are drawn evenly between tokens. A tokenizer's first token stays first.
    Attention stays causal.

    Source: Bavarian et al. 2022, sections 3.1 and 3.2, at the level of contexts and of tokens.
    """

    settings: FillInTheMiddleSettings
    eos_id: int
    prefix_id: int
    suffix_id: int
    middle_id: int
    special: NDArray[np.bool_] = field(compare=False)

    @classmethod
    def from_tokens(cls, settings: FillInTheMiddleSettings, table: TokenTable, length: int) -> "MiddleRows":
        """Look the three tokens up."""
        del length
        keys = ("prefix_token", "suffix_token", "middle_token")
        ids = [table.id_of(getattr(settings, key), f"train.objective.{key}") for key in keys]
        prefix, suffix, middle = ids
        return cls(settings, table.eos_id, prefix, suffix, middle, table.special)

    def __call__(self, row: Row, place: RowPlace) -> Row:
        """Return the row that is learned."""
        draw, text = place.random_draw("middle"), text_of(row, self.eos_id)
        documents = np.split(text, np.flatnonzero(text == self.eos_id) + 1)
        turned = [self._turn_document(document, draw) for document in documents if len(document)]
        return fitted_row(np.concatenate(turned), len(row.ids), self.eos_id)

    def _turn_document(self, document: Tokens, draw: Draw) -> Tokens:
        """Return a document as it is learned; its end stays where it is."""
        is_whole = document[-1] == self.eos_id
        body, tail = (document[:-1], document[-1:]) if is_whole else (document, document[:0])
        num_first = int(np.argmin([*self.special[body], False]))
        begin, body = body[:num_first], body[num_first:]
        turns, suffix_first = draw.draw_fractions(2)
        first, second = sorted(draw.draw_below(len(body) + 1, 2).tolist())
        if turns >= self.settings.rate:
            return document
        prefix, middle, suffix = body[:first], body[first:second], body[second:]
        marks = [np.array([mark]) for mark in (self.prefix_id, self.suffix_id, self.middle_id)]
        if suffix_first < self.settings.spm:
            parts = [marks[0], marks[1], suffix, marks[2], prefix, middle, tail]
        else:
            parts = [marks[0], prefix, marks[1], suffix, marks[2], middle, tail]
        return np.concatenate([begin, *parts])
