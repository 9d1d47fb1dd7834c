"""A corpus that was made of sources: opened only when every digest holds, then read through memory maps."""

import hashlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.config import digest
from phalanx.data.corpus import Corpus, CorpusFacts, SequenceLayout, TokenGroup
from phalanx.data.manifest import CorpusManifest, SplitRecord, parse_manifest
from phalanx.data.packing import TokenSplit
from phalanx.data.tokenizers.tokenizer import TOKENIZER_FILE
from phalanx.errors import DataError

MANIFEST_FILE = "manifest.json"
TRAIN_FILE = "train.tokens"
VALIDATION_FILE = "validation.tokens"


class PreparedCorpus(Corpus):
    """A corpus that was made of sources; all its text is one group without a name.

    Attributes:
        manifest: What it was made of; its digest is that of the corpus, unless documents are packed otherwise.
    """

    def __init__(self, directory: Path, manifest: CorpusManifest, layout: SequenceLayout) -> None:
        self.manifest = manifest
        tokenizer = manifest.tokenizer
        content = digest(manifest)
        facts = CorpusFacts(content, tokenizer.vocab_size, tokenizer.eos_id, directory / TOKENIZER_FILE)
        train = _map_tokens(directory / TRAIN_FILE, manifest, manifest.train)
        validation = _map_tokens(directory / VALIDATION_FILE, manifest, manifest.validation)
        group = TokenGroup("", content, _split(train, tokenizer.eos_id), _split(validation, tokenizer.eos_id))
        super().__init__(facts, [group], layout)


def open_corpus(directory: Path, layout: SequenceLayout) -> PreparedCorpus:
    """Check a prepared corpus against its manifest and open it.

    Raises:
        DataError: A file is missing, or its size, digest or counts are not those of the manifest.
    """
    manifest = parse_manifest(_read(directory / MANIFEST_FILE), str(directory / MANIFEST_FILE))
    itemsize = np.dtype(manifest.token_dtype).itemsize
    _check_file(directory / TOKENIZER_FILE, manifest.tokenizer.digest)
    for name, split in ((TRAIN_FILE, manifest.train), (VALIDATION_FILE, manifest.validation)):
        _check_file(directory / name, split.digest, split.tokens * itemsize)
    return PreparedCorpus(directory, manifest, layout)


def _split(tokens: NDArray[np.unsignedinteger], eos_id: int) -> TokenSplit:
    return TokenSplit(tokens, eos_id, partial(_document_starts, tokens, eos_id), _no_field)


def _document_starts(tokens: NDArray[np.unsignedinteger], eos_id: int) -> NDArray[np.int64]:
    ends = np.flatnonzero(tokens == eos_id).astype(np.int64) + 1
    return np.concatenate([np.zeros(1, dtype=np.int64), ends])


def _no_field(name: str) -> NDArray[np.float64]:
    raise DataError(
        f'data.phases: curriculum by "{name}": documents of sources have no fields; take by = "length", or build a '
        "dataset"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise _damaged(path, f"cannot be read ({exc.strerror})") from exc


def _check_file(path: Path, expected: str, size_bytes: int | None = None) -> None:
    try:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
            size = stream.tell()
    except OSError as exc:
        raise _damaged(path, f"cannot be read ({exc.strerror})") from exc
    if size_bytes is not None and size != size_bytes:
        raise _damaged(path, f"has {size} bytes, expected {size_bytes}")
    if found != expected:
        raise _damaged(path, f"has SHA-256 {found[:16]}..., expected {expected[:16]}...")


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}; delete {path.parent} to have the data made again")


def _map_tokens(path: Path, manifest: CorpusManifest, split: SplitRecord) -> NDArray[np.unsignedinteger]:
    # an empty file cannot be mapped
    if split.tokens == 0:
        return np.empty(0, dtype=manifest.token_dtype)
    return np.memmap(path, dtype=manifest.token_dtype, mode="r")
