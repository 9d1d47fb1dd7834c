"""The dataset that a run file names: opened, and compared with the run file's claims; free of torch."""

import hashlib
from pathlib import Path

from phalanx.data.config import DataConfig
from phalanx.data.phases import DatasetConfig, StreamConfig
from phalanx.data.shards import Dataset, SealKey, TokenSource, abbreviate_digests, open_dataset
from phalanx.data.shards.stored import StoredDataset
from phalanx.data.tokenizers.tokenizer import TOKENIZER_FILE, TextTokenizer, open_tokenizer, vocabulary_digest
from phalanx.errors import ConfigError, DataError

TRAIN, VALIDATION = "train", "validation"


def local_dataset(dataset: DatasetConfig, cache_dir: Path) -> Path:
    """Return the directory of a dataset; one of an object store is brought to the cache where it is not there yet.

    Of a dataset that is streamed, all but its tokens.
    """
    if isinstance(dataset.path, Path):
        return dataset.path
    stored = StoredDataset(dataset.path)
    digest = stored.read_signed(dataset.signer).statement.dataset[:32]
    home = cache_dir / f"{'dataset' if dataset.stream is None else 'streamed'}-{digest}"
    if not home.exists():
        stored.download_dataset(home, dataset.signer, with_tokens=dataset.stream is None)
    return home


class TokenFetcher:
    """Fetches tokens of a streamed dataset, up to its quota.

    Attributes:
        fetched_bytes: Bytes that have come so far.
    """

    def __init__(self, address: str, stream: StreamConfig) -> None:
        self._stored, self._stream = StoredDataset(address), stream
        self.fetched_bytes = 0

    def fetch_bytes(self, name: str, begin: int, stop: int) -> bytes:
        """Return bytes of a file, unverified.

        Raises:
            DataError: The quota would be exceeded, or the store does not give them.
        """
        quota = self._stream.max_fetched_bytes
        if quota is not None and self.fetched_bytes + stop - begin > quota:
            raise DataError(
                f"data.dataset.stream: {self.fetched_bytes} bytes were fetched, and {stop - begin} more exceed "
                f"max_fetched_bytes = {quota}; raise it, raise cache_bytes, or read in order of place"
            ).with_facts(key="data.dataset.stream.max_fetched_bytes", found=str(self.fetched_bytes))
        self.fetched_bytes += stop - begin
        return self._stored.fetch_bytes(name, begin, stop)


def open_groups(
    config: DataConfig, dataset: DatasetConfig, path: Path, tokenizer: TextTokenizer | None
) -> tuple[Dataset, tuple[str, ...]]:
    """Open a dataset and find the groups of a run in it; no token is read.

    Args:
        tokenizer: The one that the run file names; None for that of the dataset.

    Returns:
        The dataset, and the names of the groups, in its order unless the run file gives one.
    """
    key = None if dataset.key_file is None else SealKey.from_file(dataset.key_file)
    source = None
    if dataset.stream is not None and not isinstance(dataset.path, Path):
        source = TokenSource(
            TokenFetcher(dataset.path, dataset.stream).fetch_bytes, cache_bytes=dataset.stream.cache_bytes
        )
    dataset_view = open_dataset(path, dataset.signer, key, source)
    _check_tokenizer(path / TOKENIZER_FILE, dataset_view, tokenizer)
    trained = tuple(name for name, splits in dataset_view.groups.items() if TRAIN in splits)
    names = dataset.groups or trained
    weighed = [dataset.weights, config.repeats, *(phase.weights for phase in config.phases)]
    stray = sorted(({*names} - {*trained}) | ({name for group in weighed for name in group} - {*names}))
    if stray or not names:
        raise ConfigError(
            f'data: {path} has no group "{stray[0] if stray else ""}" to train on; the run has '
            f"{', '.join(names)}, the dataset {', '.join(trained) or 'none'}: name one of them"
        )
    return dataset_view, names


def _check_tokenizer(path: Path, dataset: Dataset, wanted: TextTokenizer | None) -> None:
    """Check that the dataset's tokenizer is the signed one and the tokenizer of the run file."""
    record = dataset.manifest.tokenizer
    try:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); restore it from a copy of the dataset") from exc
    if content != record.digest:
        has, expects = abbreviate_digests(content, record.digest)
        raise DataError(
            f"{path}: has SHA-256 {has}, but the signed manifest has {expects}: altered; restore it from a copy "
            "of the dataset"
        ).with_facts(code="PHX-I027", file=str(path))
    tokenizer = open_tokenizer(path, record.eos_id)
    if wanted is not None and vocabulary_digest(tokenizer) != vocabulary_digest(wanted):
        raise DataError(
            f"data.tokenizer: differs from {path} (SHA-256 {record.digest[:16]}...), which encoded the dataset: "
            f"{wanted.vocab_size} tokens and end of text {wanted.eos_id}, but the dataset has "
            f"{tokenizer.vocab_size} and {tokenizer.eos_id}; build the dataset with this tokenizer, or remove "
            "data.tokenizer"
        ).with_facts(code="PHX-I018", file=str(path), key="data.tokenizer")
