"""Token shards: written with a tree of hashes each, signed by one manifest, verified at every first read."""

from phalanx.data.manifest import TokenizerRecord as TokenizerRecord
from phalanx.data.shards.dataset import (
    Dataset as Dataset,
    TokenSource as TokenSource,
    TokenStream as TokenStream,
    open_dataset as open_dataset,
    rewrap_data_key as rewrap_data_key,
)
from phalanx.data.shards.manifest import (
    DATASET_FILE as DATASET_FILE,
    DatasetFacts as DatasetFacts,
    DatasetManifest as DatasetManifest,
    RecipeRecord as RecipeRecord,
    SourceFacts as SourceFacts,
)
from phalanx.data.shards.merkle import abbreviate_digests as abbreviate_digests
from phalanx.data.shards.records import DocumentEntry as DocumentEntry, document_digest as document_digest
from phalanx.data.shards.seal import (
    SealKey as SealKey,
    default_signing_key as default_signing_key,
    fingerprint_of as fingerprint_of,
    load_signer as load_signer,
)
from phalanx.data.shards.writer import DatasetWriter as DatasetWriter, PartWriter as PartWriter
