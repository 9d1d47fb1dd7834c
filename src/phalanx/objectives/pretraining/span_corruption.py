"""Span corruption: spans of a text are cut out, sentinels stand for them, and the spans are written out (T5)."""

from dataclasses import dataclass

import numpy as np
from pydantic import Field

from phalanx.errors import ConfigError
from phalanx.objectives.objective import ObjectiveSettings
from phalanx.objectives.pretraining.rewriting import Draw, Row, RowPlace, Tokens, TokenTable, fitted_row, text_of

_FEWEST = 2
"""Tokens of a text that has a span and something beside it."""


class SpanCorruptionSettings(ObjectiveSettings):
    """The share of the text that is cut out, and the length of spans.

    Attributes:
        rate: Share of a text's tokens that is cut out; rounded.
        mean_span: Tokens of a span, on average.
        sentinels: The text of sentinel number ``{}``, from 0, in the tokenizer.
    """

    rate: float = Field(default=0.15, gt=0.0, lt=1.0, allow_inf_nan=False)
    mean_span: float = Field(default=3.0, ge=1.0, le=10_000.0, allow_inf_nan=False)
    sentinels: str = Field(default="<extra_id_{}>", pattern=r"^[^{}]*\{\}[^{}]*$", max_length=100)

    def span_sizes(self, num_tokens: int) -> tuple[int, int]:
        """Return how many of so many tokens, at least 2, are cut out, and in how many spans."""
        noise = min(max(round(num_tokens * self.rate), 1), num_tokens - 1)
        spans = min(max(round(noise / self.mean_span), 1), noise, num_tokens - noise)
        return noise, spans


@dataclass(frozen=True)
class CorruptedRows:
    """A rewriting to ``text with sentinels <eos> sentinel span sentinel span ... <eos>``.

    The first part, with its end, is the prefix; loss is taken on the second. A row is as long as before, so that the
    text in it is shorter by what sentinels take: the part that is used is drawn, so that all of it is seen over epochs.

    Source: Raffel et al. 2020, section 3.1.4; spans as ``random_spans_noise_mask`` of T5 draws them.
    """

    settings: SpanCorruptionSettings
    table: TokenTable
    sentinel_ids: Tokens

    @classmethod
    def from_tokens(cls, settings: SpanCorruptionSettings, table: TokenTable, length: int) -> "CorruptedRows":
        """Look up as many sentinels as a row of so many tokens needs."""
        longest = max_text_length(settings, length + 1, length)
        if longest < _FEWEST:
            raise ConfigError(f"data.sequence_length = {length}: is too short for span corruption; make it 8 or more")
        needed = max(settings.span_sizes(size)[1] for size in range(_FEWEST, longest + 1))
        names = [settings.sentinels.replace("{}", str(number)) for number in range(needed)]
        return cls(
            settings, table, np.array([table.id_of(sentinel, "train.objective.sentinels") for sentinel in names])
        )

    def __call__(self, row: Row, place: RowPlace) -> Row:
        """Return the row that is learned."""
        draw, text = place.random_draw("spans"), text_of(row, self.table.eos_id)
        size = max_text_length(self.settings, len(text), len(row.ids))
        if size < _FEWEST:
            return fitted_row(text[:0], len(row.ids), self.table.eos_id)
        start = int(draw.draw_below(len(text) - size + 1, 1)[0])
        inputs, targets = self.corrupt_text(text[start : start + size], draw)
        eos = np.array([self.table.eos_id])
        tokens = np.concatenate([inputs, eos, targets, eos])
        return fitted_row(tokens, len(row.ids), self.table.eos_id, prefix=len(inputs) + 1, has_borders=False)

    def corrupt_text(self, text: Tokens, draw: Draw) -> tuple[Tokens, Tokens]:
        """Return a text with sentinels in the place of spans, and the spans, each behind its sentinel."""
        noise, spans = self.settings.span_sizes(len(text))
        cut = _cut_segments(noise, spans, draw)
        plain = _cut_segments(len(text) - noise, spans, draw)
        inputs: list[Tokens] = []
        targets: list[Tokens] = []
        position = 0
        for number, (between, span) in enumerate(zip(plain, cut, strict=True)):
            sentinel = self.sentinel_ids[number : number + 1]
            inputs += [text[position : position + between], sentinel]
            targets += [sentinel, text[position + between : position + between + span]]
            position += between + span
        return np.concatenate(inputs), np.concatenate(targets)


def max_text_length(settings: SpanCorruptionSettings, available: int, length: int) -> int:
    """Return how many of so many tokens a row of `length` inputs has room for; below 2 where for none."""
    # text, a sentinel twice for each span, and two ends, the last of which is no input
    size = available
    while size >= _FEWEST and size + 2 * settings.span_sizes(size)[1] + 1 > length:
        size -= 1
    return size


def _cut_segments(num_items: int, num_segments: int, draw: Draw) -> list[int]:
    """Cut so many items into segments of at least one each, every cut equally likely."""
    breaks = np.sort(draw.draw_order(num_items - 1)[: num_segments - 1]) + 1
    edges = np.concatenate([[0], breaks, [num_items]])
    return [int(size) for size in np.diff(edges)]
