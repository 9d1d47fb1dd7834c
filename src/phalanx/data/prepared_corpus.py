"""A corpus that was made of sources: shards that are verified before a token of them is used."""

from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.config import digest_config
from phalanx.data.corpus import Corpus, CorpusFacts, SequenceLayout, TokenGroup
from phalanx.data.manifest import CorpusManifest, parse_manifest
from phalanx.data.own_shards import GROUP, SPLITS, open_own_shards, own_starts
from phalanx.data.packing import TokenSplit
from phalanx.data.shards import Dataset
from phalanx.data.tokenizers.tokenizer import TOKENIZER_FILE
from phalanx.errors import DataError

MANIFEST_FILE = "manifest.json"


class PreparedCorpus(Corpus):
    """A corpus that was made of sources; all its text is one group without a name.

    Attributes:
        manifest: Its sources and settings; its digest is that of the corpus, unless documents are packed otherwise.
    """

    def __init__(self, dataset: Dataset, manifest: CorpusManifest, layout: SequenceLayout) -> None:
        self.manifest = manifest
        self.directory = dataset.directory
        tokenizer = manifest.tokenizer
        content = digest_config(manifest)
        path = dataset.directory / TOKENIZER_FILE
        facts = CorpusFacts(content, tokenizer.vocab_size, tokenizer.eos_id, path, dataset=dataset)
        train, validation = (_prepared_split(dataset, name, tokenizer.eos_id) for name in SPLITS)
        super().__init__(facts, [TokenGroup("", content, train, validation)], layout)


def open_corpus(directory: Path, layout: SequenceLayout, signer: str | None = None) -> PreparedCorpus:
    """Check a prepared corpus and open it."""
    shards, manifest_path = open_own_shards(directory, signer), directory / MANIFEST_FILE
    if MANIFEST_FILE not in shards.manifest.files:
        raise DataError(f"{directory}: was not made by a run; use it as data.dataset")
    return PreparedCorpus(shards, parse_manifest(manifest_path.read_bytes(), str(manifest_path)), layout)


def _prepared_split(dataset: Dataset, name: str, eos_id: int) -> TokenSplit:
    return TokenSplit(dataset.tokens(GROUP, name), eos_id, partial(own_starts, dataset, name), _no_field)


def _no_field(name: str) -> NDArray[np.float64]:
    raise DataError(
        f'data.phases: curriculum by "{name}": documents of sources have no fields; set by = "length", or build a '
        "dataset"
    )
