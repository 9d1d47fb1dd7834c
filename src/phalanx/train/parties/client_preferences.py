"""The preferences of one client: looked at before anything is called, encoded and scored where they are."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from phalanx.config import canonical_json
from phalanx.data.chat.settings import PreferencesConfig, PreferenceSource
from phalanx.data.preferences import PairCorpus, PairRows
from phalanx.data.preferences.encoder import PreferenceFiles
from phalanx.data.tokenizers import fingerprint_tokenizer
from phalanx.errors import ConfigError, DataError
from phalanx.models import ModelSource
from phalanx.models.layout import check_vocabulary
from phalanx.train.batches.preferences import add_references, read_pairs, reference_of
from phalanx.train.batches.reference import ReferenceStore
from phalanx.train.config import SplitRun
from phalanx.train.records.run_directory import cache_beside

Tell = Callable[[str], None]


@dataclass(frozen=True)
class PreferenceRows:
    """Pairs of answers, two rows each, with further rows that an objective reads."""

    pairs: PairRows

    @property
    def row_count(self) -> int:
        """Pairs."""
        return self.pairs.num_pairs

    @property
    def rows_digest(self) -> str:
        """SHA-256 in hex of all of them."""
        return self.pairs.rows_digest()

    def pick_rows(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Ids, labels and extra rows of some pairs."""
        batch = self.pairs.pair_batch(indices)
        return batch.input_ids, batch.labels, batch.extras


def look_at_preferences(wanted: PreferencesConfig, train: PreferenceSource, test: PreferenceSource) -> None:
    """Read a client's preferences, and look that none is in both files; free of torch and tokenizers."""
    learned, held_out = (
        {preference.model_dump_json() for _, preference in PreferenceFiles(file, wanted.broken).read_preferences()}
        for file in (train, test)
    )
    for file, preferences in ((train, learned), (test, held_out)):
        if not preferences:
            raise DataError(f"{file.path}: holds no preference; give at least one")
    if learned & held_out:
        raise DataError(
            f"{test.path}: {len(learned & held_out)} of its preferences are also training preferences, so the "
            "held-out score would prove nothing; remove them from one file"
        )


def read_preferences(
    run: SplitRun, source: ModelSource, files: Sequence[PreferenceSource], directory: Path, tell: Tell
) -> tuple[list[PreferenceRows], str]:
    """Encode a client's preferences, and compute once their log-probabilities under the model before training.

    The reference is this client's own copy of the model's files, of which one block is in memory at a time; its
    log-probabilities stay in the client's directory, and leave it sealed with the rows that they belong to.

    Args:
        files: The file of the pairs that are learned, and the file of held-out ones.
        directory: Directory of this client, which keeps the log-probabilities there.

    Returns:
        The rows of both files, and the digest of what renders and encodes, the same for all clients.
    """
    cache = cache_beside(directory) / "data"
    train, test = (_read_file(run, source, file, cache, tell) for file in files)
    corpus = dataclasses.replace(train, held_out=test.train)
    made_of = reference_of(run, source).content_digest(corpus)
    store = ReferenceStore(directory / f"reference-{made_of[:32]}.safetensors", must_exist=False)
    scored = add_references(run, corpus, source, store, tell)
    templates = {half.template.read_text(encoding="utf-8") for half in (train, test) if half.template is not None}
    rendering = [sorted(templates), fingerprint_tokenizer(run.data.tokenizer, source.tokenizer_path)]
    digest = hashlib.sha256(canonical_json(rendering)).hexdigest()
    return [PreferenceRows(scored.train), PreferenceRows(scored.held_out)], digest


def _read_file(run: SplitRun, source: ModelSource, file: PreferenceSource, cache: Path, tell: Tell) -> PairCorpus:
    if run.data.preferences is None:
        raise ConfigError("data.preferences: missing, so the run has no clients with preferences")
    named = run.data.preferences.model_copy(update={"sources": (file,)})
    # what is held out is a file of its own
    data = run.data.model_copy(update={"preferences": named, "validation_share": 0.0})
    corpus = read_pairs(run, data, cache, source, tell)
    check_vocabulary(corpus.vocab_size, source.vocab_size)
    return corpus
