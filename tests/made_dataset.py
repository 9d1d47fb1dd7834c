"""Small datasets for tests: every document's tokens can be computed from its number."""

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.data.shards import (
    DatasetFacts,
    DatasetManifest,
    DatasetWriter,
    DocumentEntry,
    RecipeRecord,
    SealKey,
    SourceFacts,
    TokenizerRecord,
    document_digest,
)
from phalanx.security.crypto import Identity

VOCAB_SIZE = 1000
FACTS = DatasetFacts(
    sources=(
        SourceFacts(name="notes", kind="text", fingerprint="1" * 64, licence="CC0-1.0", consent="given in writing"),
        SourceFacts(name="mails", kind="mail", fingerprint="2" * 64),
    ),
    tokenizer=TokenizerRecord(kind="bpe", vocab_size=VOCAB_SIZE, eos_id=0, digest="3" * 64),
    recipe=RecipeRecord.from_content('kind = "length"\nleast = 3\n'),
    tools={"numpy": "2.0"},
)


def text_of(number: int) -> str:
    return f"the text of document {number}"


def ids_of(number: int) -> NDArray[np.int64]:
    seed = hashlib.sha256(str(number).encode()).digest()
    return np.array([1 + byte * 3 for byte in seed[: 1 + number % 29]] + [0])


def entry_of(number: int) -> DocumentEntry:
    fields = {"score": number / 2, "language": "en"}
    return DocumentEntry(document_digest(text_of(number)), number % 2, f"notes/{number:04}.txt", fields)


def make_dataset(
    directory: Path,
    documents: int = 60,
    signer: Identity | None = None,
    *,
    dtype: Literal["<u2", "<u4"] = "<u2",
    shard_tokens: int = 300,
    seal: SealKey | None = None,
) -> DatasetManifest:
    """Two groups; every fifth document is held out."""
    with DatasetWriter(directory, dtype, shard_tokens, 256, seal) as writer:
        for number in range(documents):
            split = "validation" if number % 5 == 4 else "train"
            writer.part_writer("web" if number % 3 else "books", split).add_document(ids_of(number), entry_of(number))
        return writer.finish_dataset(FACTS, signer or Identity.without_certificate("signer"))
