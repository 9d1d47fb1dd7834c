"""Text of the host's own and text that it is to recover: two kinds, so that nothing can be known by heart."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from phalanx.data import PythonDocstringsConfig, PythonManualConfig
from phalanx.data.config import FileTokenizerConfig
from phalanx.data.sources import Source, open_source
from phalanx.data.tokenizers import TextTokenizer, load_tokenizer
from phalanx.errors import DataError
from phalanx.lab.reproduce.leaks.size import SEQUENCE_LENGTH

_MIN_CHARACTERS = 200
_CHARACTERS_EACH = 500
"""Characters of a text for each sequence that is taken of it."""

TEXTS = {"public": "docstrings of the standard library", "private": "the language reference that CPython carries"}


def public_ids(tokenizer: Path, sequences: int) -> Tensor:
    """Return text that the attackers learn from, ``[sequences, seq]``."""
    return hashed_sequences(texts_of(open_source(PythonDocstringsConfig())), tokenizer, sequences)


def private_ids(tokenizer: Path, sequences: int) -> Tensor:
    """Return text that is to be recovered, ``[sequences, seq]``."""
    return hashed_sequences(texts_of(open_source(PythonManualConfig())), tokenizer, sequences)


def hashed_sequences(
    texts: Iterable[str], tokenizer: Path, wanted: int, length: int = SEQUENCE_LENGTH, each: int = 2
) -> Tensor:
    """Return the first sequences of texts in the order of their hashes, ``[wanted, length]``.

    Args:
        each: Maximum number of sequences that are taken of one text.
    """
    loaded = load_tokenizer(FileTokenizerConfig(path=tokenizer), None)
    ordered = sorted((text.strip() for text in texts), key=_text_hash)
    long_ones = (text[: each * _CHARACTERS_EACH] for text in ordered if len(text) >= _MIN_CHARACTERS)
    rows = list(_token_rows(loaded, long_ones, wanted, length, each))
    if len(rows) < wanted:
        raise DataError(f"leaks: {len(rows)} sequences of {length} tokens, expected {wanted}: too little text")
    return torch.tensor(rows, dtype=torch.int64)


def texts_of(source: Source) -> Iterable[str]:
    """Yield the text of each document."""
    return (document.text for document in source.documents())


def _token_rows(
    tokenizer: TextTokenizer, texts: Iterable[str], wanted: int, length: int, each: int
) -> Iterable[list[int]]:
    """The first sequences of each text, until it is enough."""
    num_rows = 0
    for text in texts:
        ids = tokenizer.encode_texts([text])[0]
        for start in range(0, each * length, length):
            if num_rows < wanted and start + length <= len(ids):
                yield ids[start : start + length]
                num_rows += 1
        if num_rows == wanted:
            return


def _text_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()
