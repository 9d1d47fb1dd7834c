"""Batches of a run that learns several objectives at once: rows of each, one behind the other."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.config import canonical_json
from phalanx.data import DOCUMENTS, IGNORE, Batch, BatchLoader
from phalanx.data.batch import BatchPart
from phalanx.data.corpus import Corpus
from phalanx.data.preferences import PairCorpus
from phalanx.errors import CheckpointError
from phalanx.objectives import PART, SHARE, ExtraRows, mixed_objective, objective_of
from phalanx.train.batches.preferences import PreferenceMeasure
from phalanx.train.config import DomainRun, PipelineRun
from phalanx.train.runs.mixed import ObjectiveShare

_KEY = "objectives"
"""Key of a loader's state, with the state of each objective's own loader."""


@dataclass(frozen=True)
class LearnedPart:
    """What a further objective of a run learns from.

    Attributes:
        judge: Measures a model on held-out pairs; None of text.
    """

    name: str
    corpus: Corpus | PairCorpus
    judge: PreferenceMeasure | None = None


class MixedLoader:
    """Batches that hold rows of several objectives, in the order of the objectives.

    Args:
        shares: The objectives, that of ``[train]`` first.
        loaders: A loader of the rows of each, in the same order.
    """

    def __init__(self, shares: Sequence[ObjectiveShare], loaders: Sequence[BatchLoader]) -> None:
        self._parts = list(zip(shares, loaders, strict=True))
        self._objectives = [objective_of(share.objective) for share in shares]
        self._extras = mixed_objective(self._objectives).extras

    @classmethod
    def from_run(cls, run: PipelineRun | DomainRun, corpus: Corpus, further: Sequence[LearnedPart]) -> "MixedLoader":
        """Return the loader of a run with ``[[objectives]]``."""
        shares, corpora = run.objective_shares, [corpus, *(part.corpus for part in further)]
        loaders = [
            BatchLoader(part, share.rows // 2 if isinstance(part, PairCorpus) else share.rows, run.train.seed)
            for share, part in zip(shares, corpora, strict=True)
        ]
        return cls(shares, loaders)

    @property
    def corpus_digest(self) -> str:
        """SHA-256 in hex of all that batches are drawn from."""
        digests = [[share.name, loader.corpus_digest] for share, loader in self._parts]
        return hashlib.sha256(canonical_json(digests)).hexdigest()

    def next_batch(self) -> Batch:
        """The next rows of each objective; the rows of a microbatch have one objective."""
        batches = [loader.next_batch() for _, loader in self._parts]
        is_cut = any(DOCUMENTS in batch.extras for batch in batches)
        expected = {**self._extras, **({DOCUMENTS: ExtraRows("int64")} if is_cut else {})}
        columns: dict[str, list[Tensor]] = {name: [] for name in expected}
        for number, ((share, _), batch) in enumerate(zip(self._parts, batches, strict=True)):
            targets = max(1, self._objectives[number].count_targets(batch.labels))
            own = {**batch.extras, **_part_rows(number, share.weight / targets, len(batch.indices))}
            for name, kind in expected.items():
                # no objective reads the rows of another one; of one document attention sees all
                shape = kind.rows_shape(*batch.labels.shape)
                columns[name].append(own[name] if name in own else torch.zeros(shape, dtype=getattr(torch, kind.dtype)))
        return Batch(
            torch.cat([batch.input_ids for batch in batches]),
            torch.cat([batch.labels for batch in batches]),
            tuple(index for batch in batches for index in batch.indices),
            {name: torch.cat(rows) for name, rows in columns.items()},
            parts=tuple(_count_part(share, batch) for (share, _), batch in zip(self._parts, batches, strict=True)),
        )

    def position_state(self) -> dict[str, Any]:
        """Where the loader of each objective is."""
        return {_KEY: {share.name: loader.position_state() for share, loader in self._parts}}

    def load_position(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        saved, names = state.get(_KEY), [share.name for share, _ in self._parts]
        if set(state) != {_KEY} or not isinstance(saved, dict) or set(saved) != set(names):
            raise CheckpointError(
                f"loader state: found {state!s:.120}, expected the places of the objectives {', '.join(names)}; resume "
                "with the [[objectives]] of the run that was saved"
            )
        for share, loader in self._parts:
            if not isinstance(saved[share.name], dict):
                raise CheckpointError(f"loader state: {share.name} is {saved[share.name]!r:.80}, expected an object")
            loader.load_position(saved[share.name])


def losses_of_parts(parts: Sequence[BatchPart], microbatch_losses: Sequence[float]) -> dict[str, float]:
    """Return the mean loss of each objective in a step.

    Args:
        microbatch_losses: Weighted loss of each microbatch, in the order of the rows.
    """
    rows = sum(part.rows for part in parts) // len(microbatch_losses)
    losses, start = {}, 0
    for part in parts:
        stop = start + part.rows // rows
        losses[part.name] = sum(microbatch_losses[start:stop]) / part.weight
        start = stop
    return losses


def describe_parts(parts: Iterable[BatchPart], losses: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the entries of each objective for a line of the metrics."""
    return {
        part.name: {
            "loss": losses[part.name],
            "weight": part.weight,
            "rows": part.rows,
            "tokens": part.tokens,
            "labels": part.labels,
        }
        for part in parts
    }


def _part_rows(number: int, share: float, rows: int) -> dict[str, Tensor]:
    return {PART: torch.full((rows,), number), SHARE: torch.full((rows,), share)}


def _count_part(share: ObjectiveShare, batch: Batch) -> BatchPart:
    labels = int((batch.labels != IGNORE).sum())
    return BatchPart(share.name, share.weight, len(batch.indices), batch.input_ids.numel(), labels)
