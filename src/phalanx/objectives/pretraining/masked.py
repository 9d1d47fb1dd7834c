"""Masked language modelling: hidden tokens are predicted from both sides (BERT), token by token or whole words."""

from dataclasses import dataclass

import numpy as np
from pydantic import Field, model_validator

from phalanx.errors import ConfigError
from phalanx.objectives.causal_lm import IGNORE
from phalanx.objectives.objective import ObjectiveSettings
from phalanx.objectives.pretraining.rewriting import Draw, Row, RowPlace, Tokens, TokenTable


class MaskedSettings(ObjectiveSettings):
    """The share of hidden tokens, and their replacements.

    Attributes:
        rate: Share of a row's tokens that is predicted; rounded, at least one.
        masked: Share of these that is replaced by the mask.
        random: Share of these that is replaced by any other token; the rest stays unchanged.
        whole_words: Whether all tokens of a word are hidden together.
        mask_token: The mask's text in the tokenizer.
    """

    rate: float = Field(default=0.15, gt=0.0, lt=1.0, allow_inf_nan=False)
    masked: float = Field(default=0.8, ge=0.0, le=1.0, allow_inf_nan=False)
    random: float = Field(default=0.1, ge=0.0, le=1.0, allow_inf_nan=False)
    whole_words: bool = False
    mask_token: str = Field(default="[MASK]", min_length=1, max_length=100)

    @model_validator(mode="after")
    def _check_shares(self) -> "MaskedSettings":
        if self.masked + self.random > 1.0:
            raise ValueError(f"masked = {self.masked:g} and random = {self.random:g} are more than all; lower one")
        return self


def mask_token_of(choice: str | ObjectiveSettings) -> str | None:
    """Return the text of the mask that a run's objective hides tokens behind; None where it hides none."""
    if isinstance(choice, MaskedSettings):
        return choice.mask_token
    return MaskedSettings(kind=choice).mask_token if choice == "masked" else None


@dataclass(frozen=True)
class MaskedRows:
    """A rewriting that hides tokens; labels stand where the hidden tokens stood.

    The number of predicted tokens is fixed by the row's length, as BERT's was. Ends of documents and other special
    tokens are never hidden. Of whole words, one that would exceed the number is passed over, unless it is the first.

    Source: Devlin et al. 2019, appendix A.1; whole words as in google-research/bert, 31 May 2019.
    """

    settings: MaskedSettings
    table: TokenTable
    mask_id: int

    @classmethod
    def from_tokens(cls, settings: MaskedSettings, table: TokenTable, length: int) -> "MaskedRows":
        """Look the mask up."""
        del length
        if settings.whole_words and table.begins_word is None:
            raise ConfigError(
                f"train.objective.whole_words = true: the tokens of {table.path} do not say where a word begins "
                '(no "##", no mark of a space); remove it, or take a tokenizer that marks words'
            )
        return cls(settings, table, table.id_of(settings.mask_token, "train.objective.mask_token"))

    def __call__(self, row: Row, place: RowPlace) -> Row:
        """Return the row that is learned."""
        draw, settings = place.random_draw("masked"), self.settings
        open_places = np.flatnonzero(~self.table.special[row.ids])
        labels = np.full_like(row.ids, IGNORE)
        if not len(open_places):
            return Row(row.ids, labels, len(row.ids))
        num_masked = max(1, round(settings.rate * len(open_places)))
        if settings.whole_words:
            chosen = self._choose_words(row.ids, open_places, num_masked, draw)
        else:
            chosen = np.sort(open_places[draw.draw_order(len(open_places))[:num_masked]])
        fates, ordinary = draw.draw_fractions(len(chosen)), self.table.ordinary_ids
        others = ordinary[draw.draw_below(len(ordinary), len(chosen))]
        shown = np.where(fates < settings.masked + settings.random, others, row.ids[chosen])
        ids = row.ids.copy()
        ids[chosen] = np.where(fates < settings.masked, self.mask_id, shown)
        labels[chosen] = row.ids[chosen]
        return Row(ids, labels, len(ids))

    def _choose_words(self, ids: Tokens, open_places: Tokens, wanted: int, draw: Draw) -> Tokens:
        """Return the places of words in a random order, as long as they are no more than wanted."""
        begins = np.ones(len(open_places), dtype=np.bool_)
        if self.table.begins_word is not None:
            # behind a gap, which is an end of a document, a word begins whatever its token
            apart = np.diff(open_places) > 1
            begins[1:] = apart | self.table.begins_word[ids[open_places[1:]]]
        groups = np.split(open_places, np.flatnonzero(begins)[1:])
        chosen: list[Tokens] = []
        remaining = wanted
        for number in draw.draw_order(len(groups)).tolist():
            if len(groups[number]) <= remaining or not chosen:
                chosen.append(groups[number])
                remaining -= len(groups[number])
            if remaining <= 0:
                break
        return np.sort(np.concatenate(chosen))
