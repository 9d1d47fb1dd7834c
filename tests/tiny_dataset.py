"""A small dataset of shards, as a build makes one: groups of texts, every fifth one held out, and their tokenizer."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from phalanx.data import BpeConfig
from phalanx.data.shards import (
    DatasetFacts,
    DatasetWriter,
    DocumentEntry,
    RecipeRecord,
    SealKey,
    SourceFacts,
    TokenizerRecord,
    document_digest,
)
from phalanx.data.tokenizers import TextTokenizer
from phalanx.data.tokenizers.training import train_bpe
from phalanx.security.crypto import Identity


def write_tiny_dataset(
    home: Path,
    groups: Mapping[str, Sequence[str]],
    vocab_size: int = 300,
    recipe: str = "made\n",
    licences: Sequence[str] = ("",),
    seal: SealKey | None = None,
) -> TextTokenizer:
    """Write it; documents have a field ``quality``, and group after group a source with one of the licences."""
    tokenizer = train_bpe(iter([text for texts in groups.values() for text in texts]), BpeConfig(vocab_size=vocab_size))
    content = tokenizer.to_json()
    digest = hashlib.sha256(content).hexdigest()
    record = TokenizerRecord(kind="bpe", vocab_size=vocab_size, eos_id=tokenizer.eos_id, digest=digest)
    with DatasetWriter(home, "<u2", 500, 256, seal) as writer:
        for source, (group, texts) in enumerate(groups.items()):
            for number, text in enumerate(texts):
                (ids,) = tokenizer.encode_texts([text])
                entry = DocumentEntry(
                    document_digest(text), source % len(licences), f"{group}/{number}", {"quality": number % 7 / 7}
                )
                split = "validation" if number % 5 == 4 else "train"
                writer.part_writer(group, split).add_document(np.array([*ids, tokenizer.eos_id]), entry)
        facts = DatasetFacts(
            sources=tuple(
                SourceFacts(name="made", kind="text", fingerprint="1" * 64, licence=licence) for licence in licences
            ),
            tokenizer=record,
            recipe=RecipeRecord.from_content(recipe),
        )
        writer.finish_dataset(facts, Identity.without_certificate("signer"))
    (home / "tokenizer.json").write_bytes(content)
    return tokenizer
