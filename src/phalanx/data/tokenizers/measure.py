"""What a vocabulary makes of texts: tokens a byte and a word, unknown tokens, and texts that do not come back."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers

from phalanx.data.tokenizers.tokenizer import TextTokenizer

_BATCH_CHARACTERS = 1 << 20


@dataclass
class TextFigures:
    """The counts of the texts of one group, under one vocabulary.

    Attributes:
        words: Pieces between white space; in languages without it, a sentence is one.
        unknown: Tokens that stand for whatever is not in the vocabulary.
        returned: Texts that decode to themselves.
        altered: The beginning of the first text that did not come back; empty where all did.
    """

    documents: int = 0
    size_bytes: int = 0
    words: int = 0
    tokens: int = 0
    unknown: int = 0
    returned: int = 0
    altered: str = ""

    def count_text(self, text: str, ids: list[int], unknown: int | None, decoded: str) -> None:
        """Count one text."""
        self.documents += 1
        self.size_bytes += len(text.encode())
        self.words += len(text.split())
        self.tokens += len(ids)
        self.unknown += 0 if unknown is None else ids.count(unknown)
        self.returned += decoded == text
        if decoded != text and not self.altered:
            self.altered = text[:60]

    def to_json(self) -> dict[str, Any]:
        """Counts, and the shares that follow from them."""
        return {
            "documents": self.documents,
            "size_bytes": self.size_bytes,
            "tokens": self.tokens,
            "tokens_per_byte": self.tokens / self.size_bytes,
            "tokens_per_word": self.tokens / self.words if self.words else None,
            "unknown_share": self.unknown / self.tokens if self.tokens else None,
            "returned_share": self.returned / self.documents,
        }


def measure_texts(
    vocabularies: Mapping[str, TextTokenizer], texts: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], TextFigures]:
    """Encode and decode each text with each vocabulary.

    Args:
        texts: Pairs of group and text; a batch of them is in memory at a time.

    Returns:
        Figures by group and vocabulary, in the order of their first text.
    """
    figures: dict[tuple[str, str], TextFigures] = {}
    batch: list[tuple[str, str]] = []
    characters = 0
    for group, text in texts:
        batch.append((group, text))
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            _measure_batch(vocabularies, batch, figures)
            batch, characters = [], 0
    _measure_batch(vocabularies, batch, figures)
    return figures


def unknown_id(backend: tokenizers.Tokenizer) -> int | None:
    """Return the token for characters outside the vocabulary; None where there is none."""
    if isinstance(backend.model, tokenizers.models.Unigram):
        # its model shows it in its file alone
        number: int | None = json.loads(backend.to_str())["model"]["unk_id"]
        return number
    name = getattr(backend.model, "unk_token", None)
    return None if name is None else backend.token_to_id(name)


def _measure_batch(
    vocabularies: Mapping[str, TextTokenizer],
    batch: list[tuple[str, str]],
    figures: dict[tuple[str, str], TextFigures],
) -> None:
    for group, _ in batch:
        for name in vocabularies:
            figures.setdefault((group, name), TextFigures())
    for name, tokenizer in vocabularies.items():
        backend, unknown = tokenizer.backend, unknown_id(tokenizer.backend)
        encoded = backend.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
        ids = [item.ids for item in encoded]
        decoded = backend.decode_batch(ids, skip_special_tokens=False)
        for (group, text), tokens, back in zip(batch, ids, decoded, strict=True):
            figures[group, name].count_text(text, tokens, unknown, back)
