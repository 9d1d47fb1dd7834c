"""Spooled text to token shards."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal, TypeVar

import numpy as np

from phalanx.data.manifest import SplitRecord, count_sequences
from phalanx.data.shards import DocumentEntry, PartWriter
from phalanx.data.sources import Document
from phalanx.data.spool import KeptText, Progress, SplitSpool
from phalanx.data.tokenizers.encoder import Encoder

# enough text at once to keep every core of the encoder busy
_BATCH_CHARACTERS = 1 << 20
Text = TypeVar("Text", Document, KeptText)
_NAME = 4000
"""Characters of a document's name; a longer one is cut."""


def token_dtype(vocab_size: int) -> Literal["<u2", "<u4"]:
    """The narrowest little-endian type that holds every token id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def pack_split(
    spool: SplitSpool, encoder: Encoder, sequence_length: int, part: PartWriter, report: Progress
) -> SplitRecord:
    """Write the tokens of one split, the end-of-text token after each document.

    Args:
        sequence_length: Decides how many sequences there are; the tokens do not depend on it.
        report: Told ``("encode", documents so far)``.
    """
    dtype = np.dtype(token_dtype(encoder.tokenizer.vocab_size))
    content, end_token = hashlib.sha256(), np.uint32(encoder.tokenizer.eos_id)
    for batch in batch_texts(spool.kept_documents()):
        for document, ids in zip(batch, encoder.encode_batch([document.text for document in batch]), strict=True):
            tokens = np.append(ids, end_token).astype(dtype)
            part.add_document(tokens, document_entry(document))
            content.update(tokens.data)
        report("encode", part.documents)
    sequences, left_over = count_sequences(part.tokens, sequence_length)
    return SplitRecord(
        documents=spool.documents,
        size_bytes=spool.size_bytes,
        tokens=part.tokens,
        sequences=sequences,
        left_over_tokens=left_over,
        digest=content.hexdigest(),
    )


def document_entry(document: KeptText) -> DocumentEntry:
    """Return a dataset's entry of a kept document; its text is in NFC."""
    return DocumentEntry(hashlib.sha256(document.text.encode()).hexdigest(), document.source, document.name[:_NAME])


def batch_texts(documents: Iterable[Text]) -> Iterator[list[Text]]:
    """Yield documents in batches of about a million characters: one batch is in memory at a time."""
    batch: list[Text] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
