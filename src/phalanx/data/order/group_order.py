"""The order of one group's sequences over its epochs: each sequence once in each, whatever phases change."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx.data.order.permutation import permute_positions
from phalanx.data.order.schedule import Curriculum

Scores = Callable[[str], NDArray[np.floating]]
"""From the name of a score to that of each sequence of the group, ``[sequences]``."""


@dataclass(frozen=True)
class Leg:
    """A stretch of a group's samples with one curriculum.

    Attributes:
        start: Number within the group of its first sample.
        curriculum: Curriculum of its order; None for a random one.
        share: Number of the group's sequences that it draws from; None for all.
    """

    start: int
    curriculum: Curriculum | None
    share: int | None = None


class GroupOrder:
    """The sequence that each sample of one group is.

    Where the curriculum changes in the middle of an epoch, the rest of that epoch is the sequences that it has not had
    yet, in the new order; so every epoch has every sequence exactly once. Where the number of sequences changes, an
    epoch of the new ones begins; a larger number has all sequences of a smaller one.

    Args:
        size: Sequences of the group, at least 1.
        label: Group's label in the keys of its permutations; empty where a corpus is one group.
        legs: In order, the first from 0; two neighbours differ.
        scores: Returns the scores of its sequences; called for curricula alone.
    """

    def __init__(self, size: int, seed: int, label: str, legs: list[Leg], scores: Scores) -> None:
        parts: list[_LegOrder] = []
        whole = _GroupFacts(size, seed, label, scores)
        for number, leg in enumerate(legs):
            before = parts[-1] if parts else None
            if before is not None and before.facts.size == (leg.share or size):
                parts.append(_LegOrder(before.facts, number, leg, before))
            else:
                parts.append(_LegOrder(whole.draw_share(leg, number), number, leg, None))
        self._parts = parts
        self._starts = np.array([leg.start for leg in legs], dtype=np.int64)

    def group_sequences(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which sequence of the group each of its samples is."""
        which = np.searchsorted(self._starts, ranks, side="right") - 1
        sequences = np.empty(len(ranks), dtype=np.int64)
        for number in np.unique(which):
            here = which == number
            sequences[here] = self._parts[number].leg_sequences(ranks[here])
        return sequences


@dataclass(frozen=True)
class _GroupFacts:
    """The constants of the order of a group, or of a share of it.

    Attributes:
        origin: Number within the group of the sample with which its epochs begin.
        whole: The group that the share is of; None of a whole group.
    """

    size: int
    seed: int
    label: str
    scores: Scores
    origin: int = 0
    whole: "_GroupFacts | None" = None

    def draw_share(self, leg: Leg, number: int) -> "_GroupFacts":
        """Return the facts of the share that a leg draws from, with epochs that begin with the leg."""
        facts = replace(self, label=f"{self.label} leg {number}" if number else self.label, origin=leg.start)
        if leg.share is None:
            return facts
        share = replace(facts, size=leg.share, whole=self)
        sequences = share.name_sequences(np.arange(share.size, dtype=np.int64))
        return replace(share, scores=lambda by: np.asarray(self.scores(by))[sequences])

    def name_sequences(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Map sequence numbers of the share to sequence numbers of the group."""
        if self.whole is None:
            return numbers
        # the beginning of one permutation for all shares, so that a larger one has those of a smaller one
        label, places = f"{self.whole.label} share", numbers.astype(np.uint64)
        return permute_positions(places, self.whole.size, self.seed, 0, label).astype(np.int64)

    def order_by_score(self, sequences: NDArray[np.int64] | None, curriculum: Curriculum) -> NDArray[np.int64]:
        """Return sequences in the order of their scores, equal ones by number; None stands for all of them."""
        scores = np.asarray(self.scores(curriculum.by), dtype=np.float64)
        pool = np.arange(self.size, dtype=np.int64) if sequences is None else np.sort(sequences)
        keys = -scores[pool] if curriculum.descending else scores[pool]
        return pool[np.argsort(keys, kind="stable")]


class _LegOrder:
    """The order of one leg: over the rest of the epoch that it begins in, then over whole epochs."""

    def __init__(self, facts: _GroupFacts, number: int, leg: Leg, before: "_LegOrder | None") -> None:
        self.facts = facts
        self._number = number
        self._leg = leg
        self._before = before
        self._first_epoch, self._offset = divmod(leg.start - facts.origin, facts.size)

    def leg_sequences(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.facts.name_sequences(self._share_sequences(ranks - self.facts.origin))

    def _share_sequences(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, positions = np.divmod(ranks, self.facts.size)
        sequences = np.empty(len(ranks), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            sequences[here] = self._epoch_sequences(int(epoch), positions[here])
        return sequences

    def _epoch_sequences(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        is_rest = epoch == self._first_epoch and self._offset > 0
        size = self.facts.size - self._offset if is_rest else self.facts.size
        places = positions - self._offset if is_rest else positions
        label = f"{self.facts.label} rest {self._number}" if is_rest else self.facts.label
        if self._leg.curriculum is None:
            numbers = self._permute_places(places, size, epoch, label)
            return self._unseen_rest[numbers] if is_rest else numbers
        pool = self._ordered_rest if is_rest else self._ordered_all
        edges = self._bucket_edges(size, self._leg.curriculum.buckets)
        buckets = np.searchsorted(edges, places, side="right") - 1
        ordered = np.empty(len(places), dtype=np.int64)
        for bucket in np.unique(buckets):
            here, start, stop = buckets == bucket, int(edges[bucket]), int(edges[bucket + 1])
            within = self._permute_places(places[here] - start, stop - start, epoch, f"{label} bucket {bucket}")
            ordered[here] = start + within
        return pool[ordered]

    def _permute_places(self, places: NDArray[np.int64], size: int, epoch: int, label: str) -> NDArray[np.int64]:
        return permute_positions(places.astype(np.uint64), size, self.facts.seed, epoch, label).astype(np.int64)

    @staticmethod
    def _bucket_edges(size: int, buckets: int) -> NDArray[np.int64]:
        # no bucket is empty
        return np.arange(min(buckets, size) + 1, dtype=np.int64) * size // min(buckets, size)

    @cached_property
    def _unseen_rest(self) -> NDArray[np.int64]:
        """The sequences that the epoch in which the leg begins has not had before it."""
        if self._before is None:
            return np.arange(self.facts.size, dtype=np.int64)
        start = self._first_epoch * self.facts.size
        return self._before._share_sequences(np.arange(start + self._offset, start + self.facts.size, dtype=np.int64))

    @cached_property
    def _ordered_rest(self) -> NDArray[np.int64]:
        return self._rank_sequences(self._unseen_rest)

    @cached_property
    def _ordered_all(self) -> NDArray[np.int64]:
        return self._rank_sequences(None)

    def _rank_sequences(self, sequences: NDArray[np.int64] | None) -> NDArray[np.int64]:
        curriculum = self._leg.curriculum
        return self.facts.order_by_score(sequences, curriculum) if curriculum is not None else self._unseen_rest
