"""A dataset without some of its documents, in which every other token keeps its place."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

import numpy as np

from phalanx.data.shards.dataset import Dataset
from phalanx.data.shards.manifest import DatasetFacts, DatasetManifest, ParentRecord, SourceFacts
from phalanx.data.shards.records import DocumentEntry, document_digest
from phalanx.data.shards.seal import SealKey
from phalanx.data.shards.writer import DatasetWriter
from phalanx.errors import DataError
from phalanx.security.crypto import Identity

_TOKENIZER = "tokenizer.json"
ERASED = "erased"
"""Relation to the parent, and the beginning of the names of what stands in the place of erased documents."""


def write_erased(
    dataset: Dataset, digests: Collection[str], out: Path, signer: Identity, key: SealKey | None = None
) -> DatasetManifest:
    """Write a dataset with end-of-text tokens in the place of erased documents; their text, name and fields are gone.

    Rows and their order follow from numbers of tokens alone, so a run of the new dataset draws the same rows as one of
    the old, but for those that held an erased document.

    Args:
        key: Wraps the new data key where the dataset is encrypted.
    """
    manifest = dataset.manifest
    dtype: Literal["<u2", "<u4"] = manifest.dtype
    num_erased = 0
    with DatasetWriter(out, dtype, manifest.shard_tokens, manifest.leaf_bytes, key) as writer:
        for part in manifest.parts:
            target = writer.part_writer(part.group, part.split)
            tokens = dataset.tokens(part.group, part.split)
            starts = dataset.document_starts(part.group, part.split).tolist()
            for number, entry in enumerate(dataset.document_entries(part.group, part.split)):
                ids, kept_entry = tokens.read_tokens(starts[number], starts[number + 1]), entry
                if entry.digest in digests:
                    ids = np.full(len(ids), manifest.tokenizer.eos_id, dtype=ids.dtype)
                    # numbers order a curriculum and say nothing of the text
                    fields = {name: value for name, value in entry.fields.items() if isinstance(value, int | float)}
                    name = f"{ERASED}/{num_erased}"
                    kept_entry = DocumentEntry(document_digest(name), entry.source, name, fields)
                    num_erased += 1
                target.add_document(ids, kept_entry)
        if not num_erased:
            raise DataError(f"{dataset.directory}: has none of the documents that are to be erased")
        if (dataset.directory / _TOKENIZER).is_file():
            (out / _TOKENIZER).write_bytes((dataset.directory / _TOKENIZER).read_bytes())
        names = set(SourceFacts.model_fields)
        facts = DatasetFacts(
            sources=tuple(SourceFacts(**source.model_dump(include=names)) for source in manifest.sources),
            tokenizer=manifest.tokenizer,
            recipe=manifest.recipe,
            tools=dict(manifest.tools),
            parents=(*manifest.parents, ParentRecord(digest=dataset.digest, signer=dataset.signer, relation=ERASED)),
            # reports may quote what is erased
            files=tuple(name for name in manifest.files if name == _TOKENIZER),
        )
        return writer.finish_dataset(facts, signer)
