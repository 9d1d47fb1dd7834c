"""Further validation sets of a run: text with sources of its own, packed with the run's tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from phalanx.data.batch import Batch
from phalanx.data.config import BpeConfig, DataConfig, FileTokenizerConfig, TokenizerConfig
from phalanx.data.corpus import Corpus
from phalanx.data.loader import HeldOut
from phalanx.data.phases import DatasetTokenizerConfig
from phalanx.data.preparation import prepare_corpus
from phalanx.data.spool import Progress
from phalanx.data.tokenizers.tokenizer import end_of_text
from phalanx.errors import DataError

_SEED = 0
"""Of a draw that leaves nothing out: a set is the same for every seed of a run."""


class ValidationSet:
    """A corpus of which every sequence is held out.

    Args:
        corpus: Prepared without a validation share.
        most: Maximum of sequences, spread evenly.
    """

    def __init__(self, corpus: Corpus, most: int) -> None:
        self._corpus = corpus
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
) -> Mapping[str, HeldOut]:
    """Read and pack every further validation set of a run, or open the results of an earlier call.

    Args:
        corpus: The run's own text; its vocabulary is used where the run trains one.
    """
    tokenizer_config = tokenizer_of_corpus(config.tokenizer, corpus)
    sets: dict[str, HeldOut] = {}
    for section in config.validation:
        section_config = DataConfig(
            sources=section.sources,
            tokenizer=tokenizer_config,
            sequence_length=config.sequence_length,
            attention=config.attention,
            validation_share=0.0,
        )
        try:
            sets[section.name] = ValidationSet(
                prepare_corpus(section_config, cache_dir, _SEED, tokenizer_path, progress), section.max_sequences
            )
        except DataError as exc:
            raise DataError(f'data.validation "{section.name}": {exc}') from exc
    return sets
