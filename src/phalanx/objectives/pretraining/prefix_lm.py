"""Prefix language modelling: the first part of a row sees itself in both directions, the rest is predicted."""

from dataclasses import dataclass

import numpy as np

from phalanx.objectives.causal_lm import IGNORE
from phalanx.objectives.pretraining.rewriting import Row, RowPlace, TokenTable, text_of


@dataclass(frozen=True)
class PrefixRows:
    """A rewriting that draws the end of each row's prefix; ids stay as they are.

    Source: Raffel et al. 2020, section 3.2.1.
    """

    table: TokenTable

    @classmethod
    def from_tokens(cls, table: TokenTable, length: int) -> "PrefixRows":
        """Look nothing up."""
        del length
        return cls(table)

    def __call__(self, row: Row, place: RowPlace) -> Row:
        """Return the row that is learned."""
        num_inputs = min(len(text_of(row, self.table.eos_id)), len(row.ids))
        prefix = 1 + int(place.random_draw("prefix").draw_below(max(num_inputs - 1, 1), 1)[0])
        labels = np.where(np.arange(len(row.labels)) < prefix - 1, IGNORE, row.labels)
        return Row(row.ids, labels, prefix)
