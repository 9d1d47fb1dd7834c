"""Further validation sets of a run: text with sources of its own, packed with the run's tokenizer."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.batch import Batch
from phalanx.data.config import BpeConfig, DataConfig, FileTokenizerConfig, TokenizerConfig
from phalanx.data.corpus import Corpus
from phalanx.data.own_shards import GROUP
from phalanx.data.phases import DatasetTokenizerConfig
from phalanx.data.preparation import prepare_corpus
from phalanx.data.run_dataset import TRAIN
from phalanx.data.shards import Dataset, document_digest
from phalanx.data.spool import Progress
from phalanx.data.tokenizers.tokenizer import end_of_text, open_tokenizer
from phalanx.errors import DataError

_SEED = 0
"""Of a draw that leaves nothing out: a set is the same for every seed of a run."""
_MAX_COMPARED = 4_000_000
"""Documents of a run whose digests are read to compare them; 64 bytes each."""


class ValidationSet:
    """A corpus of which every sequence is held out.

    Args:
        corpus: Prepared without a validation share.
        most: Maximum of sequences, spread evenly.
        user_note: Sentence for a person about documents that the run trains on too; empty for none.
    """

    def __init__(self, corpus: Corpus, most: int, user_note: str = "") -> None:
        self._corpus, self.user_note = corpus, user_note
        self._used = min(corpus.num_train_sequences, most)

    @property
    def num_validation_sequences(self) -> int:
        """Sequences that are used; at least 1."""
        return self._used

    def validation_batch(self, indices: Sequence[int]) -> Batch:
        """Sequences by number."""
        have = self._corpus.num_train_sequences
        return self._corpus.train_batch([index * have // self._used for index in indices])


def tokenizer_of_corpus(config: TokenizerConfig, corpus: Corpus) -> TokenizerConfig:
    """Return the tokenizer of a run for text beside its own: one that the run trained, or a dataset's, as its file."""
    if not isinstance(config, BpeConfig | DatasetTokenizerConfig):
        return config
    return FileTokenizerConfig(path=corpus.tokenizer_path, eos_token=end_of_text(corpus.tokenizer_path, corpus.eos_id))


def prepare_validation_sets(
    config: DataConfig,
    corpus: Corpus,
    cache_dir: Path,
    tokenizer_path: Path | None = None,
    progress: Progress | None = None,
) -> Mapping[str, ValidationSet]:
    """Read and pack every further validation set of a run, or open the results of an earlier call.

    Args:
        corpus: The run's own text; its vocabulary is used where the run trains one.
    """
    tokenizer_config = tokenizer_of_corpus(config.tokenizer, corpus)
    sets: dict[str, ValidationSet] = {}
    trained = _read_trained(corpus.dataset) if config.validation else None
    for section in config.validation:
        section_config = DataConfig(
            sources=section.sources,
            tokenizer=tokenizer_config,
            sequence_length=config.sequence_length,
            attention=config.attention,
            validation_share=0.0,
        )
        try:
            held_out = prepare_corpus(section_config, cache_dir, _SEED, tokenizer_path, progress)
            sets[section.name] = ValidationSet(held_out, section.max_sequences, _describe_shared(trained, held_out))
        except DataError as exc:
            raise DataError(f'data.validation "{section.name}": {exc}') from exc
    return sets


def _read_trained(dataset: Dataset | None) -> NDArray[np.void] | None:
    """Return the digests of the documents that a run trains on; None where there are none, or too many to be read."""
    if dataset is None or dataset.manifest.documents > _MAX_COMPARED:
        return None
    return dataset.document_digests(TRAIN)


def _describe_shared(trained: NDArray[np.void] | None, held_out: Corpus) -> str:
    """Say how many documents of a validation set are among those that the run trains on, to the letter."""
    if trained is None or held_out.dataset is None:
        return "is not compared with the documents that the run trains on"
    forms = _digest_forms(held_out, held_out.dataset)
    num_shared = np.count_nonzero(np.isin(forms, trained).any(axis=1))
    if not num_shared:
        return ""
    return (
        f"{num_shared} of its {len(forms)} documents are trained on too: its figures say how well these are "
        "remembered; take them out of one of both"
    )


def _digest_forms(held_out: Corpus, dataset: Dataset) -> NDArray[np.void]:
    """Return digests of each document, ``[documents, 2]``: as a run takes a text, and as a data build does.

    The second one has the line end behind it, where it decodes to the very text.
    """
    tokenizer = open_tokenizer(held_out.tokenizer_path, held_out.eos_id)
    tokens, starts = dataset.tokens(GROUP, TRAIN), dataset.document_starts(GROUP, TRAIN).tolist()
    digests = []
    for entry, (start, stop) in zip(dataset.document_entries(GROUP, TRAIN), itertools.pairwise(starts), strict=True):
        ids = tokens[start + len(tokenizer.first_ids) : stop - 1].tolist()
        text = tokenizer.backend.decode(ids, skip_special_tokens=False)
        digests += [entry.digest, document_digest(f"{text}\n")]
    return np.frombuffer(bytes.fromhex("".join(digests)), "V32").reshape(-1, 2)
