"""Token shards: written with a tree of hashes each, signed by one manifest, verified at every first read."""

from phalanx.data.manifest import TokenizerRecord
from phalanx.data.shards.dataset import Dataset, TokenStream, open_dataset, wrap_anew
from phalanx.data.shards.manifest import (
    DATASET_FILE,
    DatasetFacts,
    DatasetManifest,
    RecipeRecord,
    SourceFacts,
)
from phalanx.data.shards.merkle import abbreviate_digests
from phalanx.data.shards.records import DocumentEntry, document_digest
from phalanx.data.shards.seal import SealKey, default_signing_key, fingerprint_of, load_signer
from phalanx.data.shards.writer import DatasetWriter, PartWriter

__all__ = [
    "DATASET_FILE",
    "Dataset",
    "DatasetFacts",
    "DatasetManifest",
    "DatasetWriter",
    "DocumentEntry",
    "PartWriter",
    "RecipeRecord",
    "SealKey",
    "SourceFacts",
    "TokenStream",
    "TokenizerRecord",
    "abbreviate_digests",
    "default_signing_key",
    "document_digest",
    "fingerprint_of",
    "load_signer",
    "open_dataset",
    "wrap_anew",
]
