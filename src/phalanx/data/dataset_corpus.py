"""A dataset of token shards as the text of a run: every leaf of it is verified before a token of it is used."""

import hashlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.config import canonical_json
from phalanx.data.config import DataConfig
from phalanx.data.corpus import Corpus, CorpusFacts, SequenceLayout, TokenGroup
from phalanx.data.packing import TokenSplit
from phalanx.data.phases import DatasetConfig
from phalanx.data.prepared_corpus import TOKENIZER_FILE
from phalanx.data.shards import Dataset, SealKey, open_dataset
from phalanx.data.tokenizer import TextTokenizer, open_tokenizer, same_tokenizer
from phalanx.errors import ConfigError, DataError

TRAIN, VALIDATION = "train", "validation"


def open_shards(config: DataConfig, dataset: DatasetConfig, tokenizer: TextTokenizer | None = None) -> Corpus:
    """Open a dataset as a run file names it.

    Args:
        config: Of the run's data.
        dataset: Where it is, and which of its groups are used.
        tokenizer: The one that the run file names; None for that of the dataset.

    Raises:
        ConfigError: A group is not in the dataset.
        DataError: The dataset is altered, signed by another key or encoded with another tokenizer, or a group has no
            training sequence.
    """
    key = None if dataset.key_file is None else SealKey.read(dataset.key_file)
    found = open_dataset(dataset.path, dataset.signer, key)
    record = found.manifest.tokenizer
    path = dataset.path / TOKENIZER_FILE
    _check_tokenizer(path, found, tokenizer)
    names = dataset.groups or tuple(name for name, splits in found.groups.items() if TRAIN in splits)
    missing = [name for name in names if TRAIN not in found.groups.get(name, ())]
    if missing or not names:
        known = ", ".join(found.groups)
        raise ConfigError(f"data.dataset.groups: {dataset.path} has no {missing or 'group'} to train on, only {known}")
    groups = [
        TokenGroup(name, _digest(found, name), _split(found, name, TRAIN), _split(found, name, VALIDATION))
        for name in names
    ]
    facts = CorpusFacts(found.digest, record.vocab_size, record.eos_id, path)
    return Corpus(facts, groups, SequenceLayout.of(config))


def _check_tokenizer(path: Path, found: Dataset, wanted: TextTokenizer | None) -> None:
    """Return where the dataset's tokenizer is the one that was signed, and the one that the run file names."""
    record = found.manifest.tokenizer
    try:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); restore it from a copy of the dataset") from exc
    if content != record.digest:
        raise DataError(
            f"{path}: has SHA-256 {content[:16]}..., the signed manifest {record.digest[:16]}...: altered; restore it "
            "from a copy of the dataset"
        ).about(code="PHX-I027", file=str(path))
    own = open_tokenizer(path, record.eos_id)
    if wanted is not None and not same_tokenizer(own, wanted):
        raise DataError(
            f"data.tokenizer: is another one than {path} (SHA-256 {record.digest[:16]}...), with which the dataset was "
            f"encoded: {wanted.vocab_size} tokens and end of text {wanted.eos_id}, where the dataset has "
            f"{own.vocab_size} and {own.eos_id}; build the dataset with this tokenizer, or leave data.tokenizer out"
        ).about(code="PHX-I018", file=str(path), key="data.tokenizer")


def _split(found: Dataset, group: str, split: str) -> TokenSplit:
    eos_id = found.manifest.tokenizer.eos_id
    if split not in found.groups[group]:
        return TokenSplit(np.empty(0, dtype=np.uint32), eos_id, _nothing, _no_score)
    tokens = found.tokens(group, split)
    return TokenSplit(tokens, eos_id, partial(_starts, found, group, split), partial(_field, found, group, split))


def _starts(found: Dataset, group: str, split: str) -> NDArray[np.int64]:
    return found.document_starts(group, split).astype(np.int64)


def _field(found: Dataset, group: str, split: str, name: str) -> NDArray[np.float64]:
    """Return a field of each document as a number."""
    values = []
    for document in found.documents(group, split):
        value = document.fields.get(name)
        if not isinstance(value, int | float):
            raise DataError(
                f'data.phases: curriculum by "{name}": document {document.name[:80]!r} of group {group} has '
                f"{'no such field' if value is None else 'no number there'}; it has "
                f"{', '.join(sorted(document.fields)[:10]) or 'no fields'}"
            )
        values.append(float(value))
    return np.array(values, dtype=np.float64)


def _digest(found: Dataset, group: str) -> str:
    part = found.part(group, TRAIN)
    files = [one.model_dump(mode="json") for one in (*part.shards, part.starts)]
    return hashlib.sha256(canonical_json(files)).hexdigest()


def _nothing() -> NDArray[np.int64]:
    return np.zeros(1, dtype=np.int64)


def _no_score(name: str) -> NDArray[np.float64]:
    return np.empty(0, dtype=np.float64)
