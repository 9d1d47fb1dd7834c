"""The texts of the sites of federated rounds: shared out as a run file says, or each site's own files."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from phalanx.data import Batch, BatchLoader, Corpus, prepare_corpus
from phalanx.data.loader import HeldOut
from phalanx.data.sources import SourceConfig
from phalanx.errors import ConfigError
from phalanx.federated.site_trainer import SiteData, WholeModel
from phalanx.models import ModelSource
from phalanx.models.layout import check_vocabulary
from phalanx.train.batches.labelled import LabelledTexts, prepare_labelled
from phalanx.train.config import FederatedRun

_HELD_OUT_ROWS = 8
"""At once."""


def load_whole_model(run: FederatedRun, source: ModelSource, num_classes: int) -> WholeModel:
    """Load the model of a run, with what its sites train of it."""
    model = WholeModel(
        source,
        run.model,
        run.train.seed,
        run.train.objective_kind,
        num_classes,
        frozen_a=run.federated.exchange == "frozen_a",
    )
    model.make_personal(run.federated.personal)
    return model


class SharedTexts:
    """All texts of a run, and the share of each site.

    Args:
        own: Sources of one site's own, in place of a share of the run's.

    Attributes:
        labelled: Labelled texts of a classification; None of any other task.
    """

    def __init__(
        self,
        run: FederatedRun,
        source: ModelSource,
        cache: Path,
        say: Callable[[str, int], None],
        *,
        own: tuple[SourceConfig, ...] = (),
    ) -> None:
        self._run, self._sites, self._is_own = run, run.federated.sites, bool(own)
        self.labelled: LabelledTexts | None = None
        self.corpus: Corpus | None = None
        seed = run.train.seed
        if run.data.labelled is not None:
            self.labelled = prepare_labelled(run.data, self._sites, seed, source.tokenizer_path)
            check_vocabulary(self.labelled.vocab_size, source.vocab_size)
        else:
            data = run.data.model_copy(update={"sources": own}) if own else run.data
            self.corpus = prepare_corpus(data, cache, seed, source.tokenizer_path, say)
            check_vocabulary(self.corpus.vocab_size, source.vocab_size)

    @property
    def num_classes(self) -> int:
        """Of a classification; 0 of anything else."""
        return 0 if self.labelled is None else len(self.labelled.classes)

    @property
    def held_out(self) -> HeldOut:
        """What the owner measures on."""
        source = self.corpus if self.labelled is None else self.labelled
        if source is None:
            raise ConfigError("data: no text")
        return source

    def share_of(self, site: str) -> SiteData:
        """Return the share of one site."""
        size, seed = self._run.train.batch_size, self._run.train.seed
        number, of = (0, 1) if self._is_own else (self._sites.index(site), len(self._sites))
        measured = [
            row for row in range(self.held_out.num_validation_sequences) if self._is_of(row, site, (number, of))
        ]
        held_out = _OwnRows(self.held_out, measured)
        if self.labelled is not None:
            texts = self.labelled.clients[site]
            loader = BatchLoader(texts, size, seed)
            return SiteData(site, loader, texts.num_train_sequences, held_out, texts.train_batch, texts.digest)
        corpus = self.corpus
        if corpus is None:
            raise ConfigError("data: no text")
        if self._run.privacy is not None and corpus.sample_order(0, size).is_mixed:
            raise ConfigError(
                "[privacy] excludes mixtures: every row must have the same chance to be drawn; use one group"
            )
        rows = corpus.shared_sequences((number, of)).tolist()

        def pick(numbers: Sequence[int]) -> Batch:
            return corpus.train_batch([rows[number] for number in numbers])

        return SiteData(site, BatchLoader(corpus, size, seed, (number, of)), len(rows), held_out, pick, corpus.digest)

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
