"""The texts of the sites of federated rounds: shared out as a run file says, or each site's own files."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path

from phalanx.data import Batch, BatchLoader, Corpus, DataConfig, prepare_corpus
from phalanx.data.loader import HeldOut
from phalanx.data.preferences import PairCorpus
from phalanx.errors import ConfigError
from phalanx.federated.site_trainer import SiteData
from phalanx.models import ModelSource
from phalanx.models.layout import check_vocabulary
from phalanx.train.batches.labelled import LabelledTexts, prepare_labelled
from phalanx.train.batches.preferences import add_references, read_pairs, reference_of
from phalanx.train.batches.reference import ReferenceStore
from phalanx.train.batches.rewriting import BatchRewriting, rewrite_held_out, rewriting_of
from phalanx.train.config import FederatedRun

_HELD_OUT_ROWS = 8
"""At once."""


class SharedTexts:
    """All texts of a run, and the share of each site.

    Args:
        own: The data of one site's own files, in place of a share of the run's; None where it has a share.

    Attributes:
        labelled: Labelled texts of a classification; None of any other task.
        corpus: Packed text, or pairs; None of labelled texts.
    """

    def __init__(
        self,
        run: FederatedRun,
        source: ModelSource,
        cache: Path,
        say: Callable[[str, int], None],
        *,
        own: DataConfig | None = None,
    ) -> None:
        self._run, self._source, self._sites, self._is_own = run, source, run.federated.sites, own is not None
        self._cache = cache
        self.labelled: LabelledTexts | None = None
        self.corpus: Corpus | PairCorpus | None = None
        seed, data = run.train.seed, own or run.data
        if data.labelled is not None:
            self.labelled = prepare_labelled(data, self._sites, seed, source.tokenizer_path)
            check_vocabulary(self.labelled.vocab_size, source.vocab_size)
            return
        if data.preferences is not None:
            self.corpus = read_pairs(run, data, cache, source, lambda line: None)
        else:
            self.corpus = prepare_corpus(data, cache, seed, source.tokenizer_path, say)
        check_vocabulary(self.corpus.vocab_size, source.vocab_size)

    @property
    def num_classes(self) -> int:
        """Of a classification; 0 of anything else."""
        return 0 if self.labelled is None else len(self.labelled.classes)

    @property
    def held_out(self) -> HeldOut:
        """What the owner measures on."""
        texts = self.labelled if self.corpus is None else self.corpus
        if texts is None:
            raise ConfigError("data: no text")
        return rewrite_held_out(texts, self._rewriting)

    def with_references(self, store: ReferenceStore, say: Callable[[str], None]) -> HeldOut:
        """Return the owner's held-out data, pairs with their reference's log-probabilities.

        The owner trains on no pair and computes none of those that sites train on.
        """
        if not isinstance(self.corpus, PairCorpus):
            return self.held_out
        return add_references(self._run, self.corpus.without_training(), self._source, store, say)

    def share_of(self, site: str) -> SiteData:
        """Return the share of one site."""
        size, seed = self._run.train.draws_per_step, self._run.train.seed
        number, of = (0, 1) if self._is_own else (self._sites.index(site), len(self._sites))
        corpus = self.corpus
        if isinstance(corpus, PairCorpus):
            return self._pairs_of(site, corpus.share_of(number, of))
        held_out = self.held_out
        measured = [row for row in range(held_out.num_validation_sequences) if self._is_of(row, site, (number, of))]
        own_rows = _OwnRows(held_out, measured)
        if self.labelled is not None:
            texts = self.labelled.clients[site]
            loader = BatchLoader(texts, size, seed)
            return SiteData(site, loader, texts.num_train_sequences, own_rows, texts.train_batch, texts.digest)
        if corpus is None:
            raise ConfigError("data: no text")
        if self._run.privacy is not None and corpus.sample_order(0, size).is_mixed:
            raise ConfigError(
                "[privacy] excludes mixtures: every row must have the same chance to be drawn; use one group"
            )
        rows = corpus.shared_sequences((number, of)).tolist()

        def pick(numbers: Sequence[int]) -> Batch:
            return corpus.train_batch([rows[number] for number in numbers])

        loader = BatchLoader(corpus, size, seed, (number, of), self._rewriting)
        return SiteData(site, loader, len(rows), own_rows, pick, corpus.digest)

    def _pairs_of(self, site: str, share: PairCorpus) -> SiteData:
        """Return pairs of one site, whose log-probabilities under the reference the site computes itself."""
        made_of = reference_of(self._run, self._source).content_digest(share)
        store = ReferenceStore(self._cache / f"reference-{made_of[:32]}.safetensors", must_exist=False)
        self._cache.mkdir(parents=True, exist_ok=True)
        pairs = add_references(self._run, share, self._source, store, lambda line: None)
        loader = BatchLoader(pairs, self._run.train.draws_per_step, self._run.train.seed)
        own_rows = _OwnRows(pairs, range(pairs.num_validation_sequences))
        return SiteData(site, loader, pairs.num_train_sequences, own_rows, pairs.train_batch, pairs.digest)

    @cached_property
    def _rewriting(self) -> BatchRewriting | None:
        return None if self.corpus is None else rewriting_of(self._run, self.corpus)

    def _is_of(self, row: int, site: str, share: tuple[int, int]) -> bool:
        holders = () if self.labelled is None else self.labelled.holders
        return holders[row] == site if holders else row % share[1] == share[0]


class _OwnRows:
    """The held-out rows of one site, some at once."""

    def __init__(self, held_out: HeldOut, rows: Sequence[int]) -> None:
        self._held_out, self._rows = held_out, rows

    def __call__(self) -> Iterable[Batch]:
        for start in range(0, len(self._rows), _HELD_OUT_ROWS):
            yield self._held_out.validation_batch(self._rows[start : start + _HELD_OUT_ROWS])
