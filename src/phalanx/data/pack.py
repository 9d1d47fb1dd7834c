"""Spooled text to token files."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from phalanx.data.manifest import SplitRecord, count_sequences
from phalanx.data.spool import Progress, SplitSpool
from phalanx.data.tokenizers.encoder import Encoder

# enough text at once to keep every core of the encoder busy
_BATCH_CHARACTERS = 1 << 20


def token_dtype(vocab_size: int) -> Literal["<u2", "<u4"]:
    """The narrowest little-endian type that holds every token id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def pack(spool: SplitSpool, encoder: Encoder, sequence_length: int, path: Path, report: Progress) -> SplitRecord:
    """Write the tokens of one split, the end-of-text token after each document.

    Args:
        spool: The documents.
        encoder: Gives the ids.
        sequence_length: Decides how many sequences there are; the file does not depend on it.
        path: Of the token file.
        report: Told ``("encode", documents so far)``.
    """
    dtype = np.dtype(token_dtype(encoder.tokenizer.vocab_size))
    content, end = hashlib.sha256(), np.uint32(encoder.tokenizer.eos_id)
    num_tokens = num_documents = 0
    with path.open("wb") as stream:
        for texts in _batches(spool.texts()):
            for ids in encoder.encode_batch(texts):
                block = np.append(ids, end).astype(dtype).tobytes()
                stream.write(block)
                content.update(block)
                num_tokens += len(ids) + 1
            num_documents += len(texts)
            report("encode", num_documents)
    sequences, left_over = count_sequences(num_tokens, sequence_length)
    return SplitRecord(
        documents=spool.documents,
        size_bytes=spool.size_bytes,
        tokens=num_tokens,
        sequences=sequences,
        left_over_tokens=left_over,
        digest=content.hexdigest(),
    )


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
