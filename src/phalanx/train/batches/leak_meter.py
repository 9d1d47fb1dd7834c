"""The leak meter: how far the model repeats planted canaries and its training rows, measured while it trains."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from phalanx.data import Batch, BatchLoader, Corpus
from phalanx.data.batch import DOCUMENTS, IGNORE
from phalanx.data.sources import CanarySettings, candidate_canaries, planted_canaries
from phalanx.data.tokenizers.tokenizer import open_tokenizer
from phalanx.errors import ConfigError
from phalanx.security.privacy.leakage import LeakLosses, max_exposure_bits
from phalanx.train.batches.scores import Validation, loss_of
from phalanx.train.config import DomainRun, PipelineRun
from phalanx.train.train_section import LeakMeterConfig

MeasureSets = Callable[[Sequence[Sequence[Batch]]], Sequence[Validation]]
_STEP_OF_LENGTH = 8


@dataclass(frozen=True)
class LeakReading:
    """One measurement."""

    figures: dict[str, float]
    wall_s: float

    def metrics_row(self) -> dict[str, float]:
        """The columns of a step's line in the metrics, without the ones that were not measured."""
        row = {
            "leak_exposure_bits": self.figures.get("exposure_bits"),
            "leak_exposure_mean_bits": self.figures.get("exposure_mean_bits"),
            "leak_membership_auc": self.figures.get("membership_auc"),
            "leak_true_negatives": self.figures.get("true_negatives"),
            "leak_wall_s": self.wall_s,
        }
        return {name: value for name, value in row.items() if value is not None}


class LeakMeter:
    """Rows whose losses show a leak, one batch each: no figure depends on the other rows.

    Args:
        rows: Canaries, candidates, members and strangers, in this order.
    """

    def __init__(self, config: LeakMeterConfig, rows: tuple[tuple[Batch, ...], ...]) -> None:
        self.config = config
        self._rows = rows
        self.max_bits = max_exposure_bits(len(rows[1])) if rows[0] else None

    @classmethod
    def from_run(cls, run: PipelineRun | DomainRun, corpus: Corpus) -> "LeakMeter | None":
        """Draw the rows of a run; None where its run file has no ``[leak_meter]``."""
        config = run.leak_meter
        if config is None:
            return None
        planted = canaries_of(run, corpus)
        if planted is None and config.max_exposure is not None:
            raise ConfigError(
                "leak_meter.max_exposure: no canary is planted in the training text; add [canaries] to the recipe of "
                'the dataset, or a source of kind "canaries" to data.sources'
            )
        texts = (
            ([], []) if planted is None else (planted_canaries(planted), candidate_canaries(planted, config.candidates))
        )
        encode = partial(_canary_batch, run, corpus)
        num_rows = min(config.rows, corpus.num_train_sequences, corpus.num_validation_sequences)
        # those of the first steps: at every measurement all of them were trained on
        drawn = BatchLoader(corpus, max(1, num_rows), run.train.seed).next_sequences()[:num_rows]
        members = tuple(corpus.train_batch([number]) for number in dict.fromkeys(drawn))
        strangers = tuple(corpus.validation_batch([number]) for number in range(num_rows))
        return cls(config, (*(tuple(encode(part)) for part in texts), members, strangers))

    @property
    def num_rows(self) -> int:
        """Rows that a measurement computes."""
        return sum(map(len, self._rows))

    def is_due(self, num_steps: int, last: int) -> bool:
        """Whether it is measured after so many finished steps."""
        return num_steps % self.config.every == 0 or num_steps == last

    def measure_leak(self, measure: MeasureSets) -> LeakReading:
        """Measure the model as it is."""
        started = time.perf_counter()
        batches = [batch for part in self._rows for batch in part]
        # a row is a set of its own, so that its loss is not summed up with others
        means = [loss_of(value) if isinstance(value, float) else math.nan for value in measure([[b] for b in batches])]
        losses: list[tuple[float, ...]] = []
        for number, part in enumerate(self._rows):
            part_means, means = means[: len(part)], means[len(part) :]
            weights = [int((batch.labels != IGNORE).sum()) if number < 2 else 1 for batch in part]
            losses.append(tuple(mean * weight for mean, weight in zip(part_means, weights, strict=True)))
        figures = LeakLosses(*losses).read_leak()
        return LeakReading(figures, time.perf_counter() - started)

    def is_above(self, reading: LeakReading) -> bool:
        """Whether a canary is more exposed than the run file allows."""
        limit = self.config.max_exposure
        return limit is not None and reading.figures.get("exposure_bits", 0.0) > limit


def canaries_of(run: PipelineRun | DomainRun, corpus: Corpus) -> CanarySettings | None:
    """Return the canaries that are planted in the text of a run."""
    canaries = [source for source in run.data.sources if isinstance(source, CanarySettings)]
    return canaries[0] if canaries else corpus.canaries


def _canary_batch(run: PipelineRun | DomainRun, corpus: Corpus, texts: Sequence[str]) -> list[Batch]:
    """Return a row for each text, filled up behind its end, where it changes nothing."""
    encoded = open_tokenizer(corpus.tokenizer_path, corpus.eos_id).encode_texts(texts)
    length = run.data.sequence_length
    is_cut = isinstance(run, DomainRun) and run.parallel.num_ranks != run.parallel.dp
    if not is_cut:
        longest = max((len(ids) for ids in encoded), default=1)
        length = min(length, -(-longest // _STEP_OF_LENGTH) * _STEP_OF_LENGTH)
    batches = []
    for ids in encoded:
        row = torch.full((2, length), IGNORE, dtype=torch.int64)
        row[0] = corpus.eos_id
        inputs, labels = ids[:-1][:length], ids[1:][:length]
        row[0, : len(inputs)], row[1, : len(labels)] = torch.tensor(inputs), torch.tensor(labels)
        extras = {DOCUMENTS: torch.zeros((1, length), dtype=torch.int64)} if run.data.attention == "document" else {}
        batches.append(Batch(row[:1], row[1:], (0,), extras))
    return batches
