"""A packed corpus on disk: opened only when every digest holds, then read through memory maps."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.config import digest
from phalanx.data.batch import IGNORE, Batch
from phalanx.data.manifest import CorpusManifest, SplitRecord, parse_manifest
from phalanx.errors import DataError

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
TRAIN_FILE = "train.tokens"
VALIDATION_FILE = "validation.tokens"


class Corpus:
    """Training and validation sequences of one fixed length.

    A sequence may hold several documents. No loss is taken across a border, but attention does reach
    back over it, as in GPT-2's training.

    Attributes:
        manifest: What it was made of.
        vocab_size: One more than the largest token id.
        eos_id: Ends every document.
        digest: SHA-256 in hex of the manifest, and so of every token.
        tokenizer_path: Its ``tokenizer.json``.
        num_train_sequences: At least 1.
        num_validation_sequences: At most ``max_validation_sequences``; 0 when no share is held out.
    """

    def __init__(self, directory: Path, manifest: CorpusManifest, max_validation_sequences: int) -> None:
        self.manifest = manifest
        self.digest = digest(manifest)
        self.vocab_size = manifest.tokenizer.vocab_size
        self.eos_id = manifest.tokenizer.eos_id
        self.tokenizer_path = directory / TOKENIZER_FILE
        self.num_train_sequences = manifest.train.sequences
        self.num_validation_sequences = min(manifest.validation.sequences, max_validation_sequences)
        self._train = _map_tokens(directory / TRAIN_FILE, manifest, manifest.train)
        self._validation = _map_tokens(directory / VALIDATION_FILE, manifest, manifest.validation)

    @property
    def train_tokens(self) -> NDArray[np.unsignedinteger]:
        """All training tokens in a row, ``[tokens]``, read-only."""
        return self._train

    def train_batch(self, indices: Sequence[int]) -> Batch:
        """Training sequences by number.

        Raises:
            DataError: There is no such sequence.
        """
        return self._batch(self._train, indices, self.num_train_sequences, indices)

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Validation sequences by number, spread evenly over the held-out text when there are too many.

        Raises:
            DataError: There is no such sequence.
        """
        have, used = self.manifest.validation.sequences, self.num_validation_sequences
        windows = [index * have // max(used, 1) for index in indices]
        return self._batch(self._validation, indices, used, windows)

    def _batch(
        self, tokens: NDArray[np.unsignedinteger], indices: Sequence[int], size: int, windows: Sequence[int]
    ) -> Batch:
        for index in indices:
            if not 0 <= index < size:
                raise DataError(f"sequence {index} was asked for; this split has 0 to {size - 1}")
        length = self.manifest.sequence_length
        starts = np.asarray(windows, dtype=np.int64).reshape(-1, 1) * length
        rows = torch.from_numpy(tokens[starts + np.arange(length + 1)].astype(np.int64))
        input_ids = rows[:, :-1].contiguous()
        labels = rows[:, 1:].masked_fill(input_ids == self.eos_id, IGNORE)
        return Batch(input_ids, labels, tuple(indices))


def open_corpus(directory: Path, max_validation_sequences: int) -> Corpus:
    """Check a prepared corpus against its manifest and open it.

    Raises:
        DataError: A file is missing, or its size, digest or counts are not those of the manifest.
    """
    manifest = parse_manifest(_read(directory / MANIFEST_FILE), str(directory / MANIFEST_FILE))
    itemsize = np.dtype(manifest.token_dtype).itemsize
    _check_file(directory / TOKENIZER_FILE, manifest.tokenizer.digest)
    for name, split in ((TRAIN_FILE, manifest.train), (VALIDATION_FILE, manifest.validation)):
        _check_file(directory / name, split.digest, split.tokens * itemsize)
    return Corpus(directory, manifest, max_validation_sequences)


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
