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

_CHARACTERS = 1000
_MIN_CHARACTERS = 200
_SEQUENCES_EACH = 2

TEXTS = {"public": "docstrings of the standard library", "private": "the language reference that CPython carries"}


def public_ids(tokenizer: Path, sequences: int) -> Tensor:
    """Return text that the attackers learn from, ``[sequences, seq]``."""
    return _hashed_sequences(open_source(PythonDocstringsConfig()), tokenizer, sequences)


def private_ids(tokenizer: Path, sequences: int) -> Tensor:
    """Return text that is to be recovered, ``[sequences, seq]``."""
    return _hashed_sequences(open_source(PythonManualConfig()), tokenizer, sequences)


def _hashed_sequences(source: Source, tokenizer: Path, wanted: int) -> Tensor:
    loaded = load_tokenizer(FileTokenizerConfig(path=tokenizer), None)
    texts = sorted((document.text.strip() for document in source.documents()), key=_text_hash)
    rows = list(_token_rows(loaded, (text[:_CHARACTERS] for text in texts if len(text) >= _MIN_CHARACTERS), wanted))
    if len(rows) < wanted:
        raise DataError(f"leaks: {len(rows)} sequences of {SEQUENCE_LENGTH} tokens, expected {wanted}: too little text")
    return torch.tensor(rows, dtype=torch.int64)


def _token_rows(tokenizer: TextTokenizer, texts: Iterable[str], wanted: int) -> Iterable[list[int]]:
    """The first sequences of each text, until it is enough."""
    num_rows = 0
    for text in texts:
        ids = tokenizer.encode_texts([text])[0]
        for start in range(0, _SEQUENCES_EACH * SEQUENCE_LENGTH, SEQUENCE_LENGTH):
            if num_rows < wanted and start + SEQUENCE_LENGTH <= len(ids):
                yield ids[start : start + SEQUENCE_LENGTH]
                num_rows += 1
        if num_rows == wanted:
            return


def _text_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "replace")).digest()
