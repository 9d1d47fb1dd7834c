"""Rows of a corpus as text, in learned and unlearned pieces."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import tokenizers

from phalanx.data.batch import DOCUMENTS, IGNORE, Batch
from phalanx.data.corpus import Corpus


@dataclass(frozen=True)
class RowPiece:
    """Neighbouring tokens of one document of a row that are all learned, or all not."""

    text: str
    tokens: int
    learned: bool
    document: int


def row_pieces(batch: Batch, corpus: Corpus, *, in_place: bool = False) -> list[RowPiece]:
    """Return the first row of a batch in pieces; what fills the row at its end is left out.

    Args:
        batch: Of the corpus, as the objective learns it.
        in_place: Whether a label is the token of its own place, which is then shown, and not the one behind it.
    """
    ids: list[int] = batch.input_ids[0].tolist()
    if in_place:
        labels: list[int] = batch.labels[0].tolist()
        ids = [token if label == IGNORE else label for token, label in zip(ids, labels, strict=True)]
    backend = tokenizers.Tokenizer.from_file(str(corpus.tokenizer_path))
    kinds = list(_token_roles(batch, in_place=in_place))
    pieces, position = [], 0
    for (document, learned), group in groupby(kinds):
        size = len(list(group))
        text = backend.decode(ids[position : position + size], skip_special_tokens=False)
        pieces.append(RowPiece(text, size, learned, document))
        position += size
    return pieces[:-1] if _is_filling(ids, kinds, pieces, corpus.eos_id) else pieces


def pieces_of(ids: Sequence[int], learned: Sequence[bool], backend: tokenizers.Tokenizer) -> list[RowPiece]:
    """Return a row of one document in pieces."""
    pieces, position = [], 0
    for is_learned, group in groupby(learned):
        size = len(list(group))
        text = backend.decode(list(ids[position : position + size]), skip_special_tokens=False)
        pieces.append(RowPiece(text, size, is_learned, 0))
        position += size
    return pieces


def _token_roles(batch: Batch, *, in_place: bool) -> Iterator[tuple[int, bool]]:
    """The document of each token, and whether it is the label of the one before, or of its own place."""
    labels: list[int] = batch.labels[0].tolist()
    documents = batch.extras[DOCUMENTS][0].tolist() if DOCUMENTS in batch.extras else [0] * len(labels)
    for index, document in enumerate(documents):
        yield document, labels[index] != IGNORE if in_place else index > 0 and labels[index - 1] != IGNORE


def _is_filling(ids: Sequence[int], kinds: Sequence[tuple[int, bool]], pieces: Sequence[RowPiece], eos_id: int) -> bool:
    """Whether the last piece is nothing but tokens that fill a row."""
    size = pieces[-1].tokens
    return len(pieces) > 1 and not kinds[-1][1] and all(token_id == eos_id for token_id in ids[len(ids) - size :])
