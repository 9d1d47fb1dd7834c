"""Pairs of a run, and scores of a model on held-out ones: accuracy, margin, distance from its reference."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from phalanx.data import IGNORE, Batch, DataConfig
from phalanx.data.preferences import PairCorpus, prepare_preferences, trim_padding
from phalanx.errors import CheckpointError
from phalanx.models import ModelSource, StageModule
from phalanx.objectives import OBJECTIVES, Objective, objective_of
from phalanx.objectives.kto import WANTED
from phalanx.objectives.pairs import REFERENCE
from phalanx.train.batches.reference import ReferenceModel, ReferenceStore, reference_log_probs
from phalanx.train.config import RunConfig


@dataclass(frozen=True)
class PreferenceScores:
    """The scores of a model on held-out pairs.

    Attributes:
        accuracy: Share of the pairs of which the better answer is worth more to the model; equal worth counts half. Of
            single answers: the same share of all pairs of a wanted and an unwanted one.
        margin: Mean difference in worth of the better answer, by the objective's measure.
        kl: Divergence of the model from its reference, in nats a token, mean over the tokens of the answers, exactly
            over the vocabulary; None of a model that gives scores.
    """

    loss: float
    accuracy: float
    margin: float
    kl: float | None


def prepare_pairs(
    run: RunConfig, cache: Path, source: ModelSource, store: ReferenceStore, say: Callable[[str], None]
) -> PairCorpus:
    """Return the pairs of a run with the rows that its objective reads.

    Args:
        run: Needs the section `data.preferences`.
        cache: Directory of a vocabulary that is trained here.
    """
    return add_references(run, read_pairs(run, run.data, cache, source, say), source, store, say)


def read_pairs(
    run: RunConfig, data: DataConfig, cache: Path, source: ModelSource, say: Callable[[str], None]
) -> PairCorpus:
    """Return the pairs of `data` as the run's objective reads them, without a reference's log-probabilities.

    Args:
        data: The run's own, or with other preferences in its place.
    """
    extras = OBJECTIVES[run.train.objective_kind].extras
    return prepare_preferences(data, cache, run.train.seed, source.tokenizer_path, say, single=WANTED in extras)


def add_references(
    run: RunConfig, corpus: PairCorpus, source: ModelSource, store: ReferenceStore, say: Callable[[str], None]
) -> PairCorpus:
    """Return pairs with the log-probabilities of their reference, where the run's objective reads any."""
    extra_names = OBJECTIVES[run.train.objective_kind].extras
    more: dict[str, dict[str, Tensor]] = {"train": {}, "held_out": {}}
    if REFERENCE in extra_names:
        if not store.path.is_file() and not store.must_exist:
            rows = len(corpus.train.ids) + len(corpus.held_out.ids)
            begun = ", continuing an earlier session" if store.parts_directory.is_dir() else ""
            say(f"computing the reference's log-probabilities of {rows} rows, once{begun}")
        reference = reference_log_probs(store, corpus, reference_of(run, source))
        more = {name: {REFERENCE: column} for name, column in reference.items()}
    names = tuple(extra_names)
    return dataclasses.replace(
        corpus,
        train=corpus.train.with_extras(more["train"], names),
        held_out=corpus.held_out.with_extras(more["held_out"], names),
    )


def reference_of(run: RunConfig, source: ModelSource) -> ReferenceModel:
    """Return the reference model of a run."""
    return ReferenceModel(source, run.model.attention, run.train.seed, quantize=run.model.base_quantization)


class PreferenceMeasure:
    """A measure of a chain of stages on held-out pairs."""

    def __init__(self, run: RunConfig, source: ModelSource) -> None:
        self._objective: Objective = objective_of(run.train.objective)
        self._single = WANTED in self._objective.extras
        self._reference = reference_of(run, source)

    @torch.no_grad()
    def __call__(self, stages: Iterable[StageModule], sets: Sequence[Iterable[Batch]]) -> list[PreferenceScores]:
        """Measure stages, each of which is used once for all batches of all sets and can then be dropped."""
        numbered_batches = [(number, trim_padding(batch)) for number, batches in enumerate(sets) for batch in batches]
        hidden = [batch.input_ids for _, batch in numbered_batches]
        before = list(hidden)
        tallies = [_PairTally() for _ in sets]
        for stage in stages:
            was_training = stage.training
            stage.eval()
            device = next(stage.parameters()).device
            reference = self._reference.read_stage(stage.spec) if self._objective.head == "lm" else None
            for n, (number, batch) in enumerate(numbered_batches):
                hidden[n] = stage(hidden[n].to(device))
                if reference is not None:
                    before[n] = reference(before[n])
                if stage.spec.is_last:
                    self._add_batch(tallies[number], batch, hidden[n].cpu(), None if reference is None else before[n])
                    hidden[n] = before[n] = batch.input_ids
            stage.train(was_training)
        return [tally.final_scores(single=self._single) for tally in tallies]

    def _add_batch(self, tally: "_PairTally", batch: Batch, logits: Tensor, before: Tensor | None) -> None:
        # row by row, for two tables of logits over a vocabulary are large
        loss, pairs = self._objective(logits, batch.labels, batch.extras)
        tally.loss += float(loss)
        tally.pairs += pairs
        worth = self._objective.worth_of(logits, batch.labels, batch.extras).tolist()
        is_wanted = batch.extras[WANTED].tolist() if self._single else [1, 0] * (len(worth) // 2)
        for row in range(0, len(worth), 2 if self._single else 1):
            (tally.better if is_wanted[row] else tally.worse).append(worth[row])
        for row in range(len(worth) if before is not None else 0):
            counted = batch.labels[row] != IGNORE
            ours, theirs = (
                torch.log_softmax(row_logits[row][counted].float(), -1)
                for row_logits in (logits, before)
                if row_logits is not None
            )
            tally.divergence += float((ours.exp() * (ours - theirs)).sum())
            tally.tokens += int(counted.sum())


@dataclass
class _PairTally:
    loss: float = 0.0
    pairs: int = 0
    divergence: float = 0.0
    tokens: int = 0
    better: list[float] = dataclasses.field(default_factory=list)
    worse: list[float] = dataclasses.field(default_factory=list)

    def final_scores(self, *, single: bool) -> PreferenceScores:
        better = torch.tensor(self.better, dtype=torch.float64)
        worse = torch.tensor(self.worse, dtype=torch.float64)
        if not len(better) or not len(worse):
            gaps = torch.zeros(0, dtype=torch.float64)
        else:
            gaps = (better.unsqueeze(1) - worse).flatten() if single else better - worse
        right = (gaps > 0).double() + 0.5 * (gaps == 0).double()
        return PreferenceScores(
            self.loss / self.pairs,
            float(right.mean()) if len(gaps) else 0.5,
            float(gaps.mean()) if len(gaps) else 0.0,
            self.divergence / self.tokens if self.tokens else None,
        )


def read_preference_scores(saved: object) -> PreferenceScores:
    """Read the scores of a checkpoint; a loss of null is an infinity, a margin of null no number."""
    names = [field.name for field in dataclasses.fields(PreferenceScores)]
    if isinstance(saved, dict):
        lacking = {"loss": math.inf, "margin": math.nan}
        saved = saved | {name: number for name, number in lacking.items() if saved.get(name, 0) is None}
    numbers = isinstance(saved, dict) and all(type(score) is float for name, score in saved.items() if name != "kl")
    if not isinstance(saved, dict) or sorted(saved) != sorted(names) or not numbers:
        raise CheckpointError(f"checkpoint: scores {saved!r:.80}, expected {', '.join(names)}; use an older one")
    return PreferenceScores(**saved)
