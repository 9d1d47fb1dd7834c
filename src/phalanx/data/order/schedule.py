"""The phases of a run: which group sample k is from, and the number of that sample within its group."""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from phalanx.data.order.mixture import Mixture, mixture_of
from phalanx.errors import DataError


@dataclass(frozen=True)
class Phase:
    """A part of a run with one mixture and one curriculum.

    Attributes:
        until: Samples of the run at its end; None of the last phase, which has none.
        weights: Weight of each group, 0 where it has no sample in the phase.
        curriculum: Curriculum that orders the sequences of a group; None for a random order.
        span: Tokens that attention spans at most; None for whole sequences.
        amount: Share of each group's sequences that samples are drawn from, above 0.
    """

    until: int | None
    weights: tuple[float, ...]
    curriculum: "Curriculum | None" = None
    span: int | None = None
    amount: float = 1.0

    def num_drawn(self, size: int) -> int:
        """Return how many of a group's sequences samples are drawn from, at least 1."""
        # as it is written: three tenths of ten are three
        return math.ceil(Fraction(repr(self.amount)) * size)


@dataclass(frozen=True)
class Curriculum:
    """An order of sequences by a score, cut into buckets; within a bucket the order is random.

    Attributes:
        by: The score: "length", the tokens of a document, or a field of documents that holds numbers.
        buckets: Parts of equal size, in the order of the score.
        descending: Whether the highest score comes first.
    """

    by: str
    buckets: int
    descending: bool = False


@dataclass(frozen=True)
class _Segment:
    """A run of samples with one mixture: a phase, or the part of it between two groups' ends."""

    start: int
    mixture: Mixture
    consumed: tuple[int, ...]
    """Samples of each group before it."""


class PhaseSchedule:
    """The phases of a run over groups of known sizes; only a few integers a phase are kept, whatever their length.

    A group that has reached its limit gives no more: from the next sample on its weight goes to the others of its
    phase, by their weights.

    Args:
        sizes: Sequences of each group, each at least 1.
        phases: In order; at least one, and only the last has no end.
        limits: Samples that each group may give in the whole run; None for as many as are asked for.
    """

    def __init__(self, sizes: Sequence[int], phases: Sequence[Phase], limits: Sequence[int | None]) -> None:
        self.sizes = tuple(sizes)
        self.phases = tuple(phases)
        self._limits = tuple(limits)
        self._segments: list[_Segment] = []
        self.starts: list[tuple[int, tuple[int, ...]]] = []
        """Of each phase: samples of the run, and of each group, before it."""
        self.num_samples = self._lay_out()
        """Samples until every group of the phase has reached its limit; None where there is no end."""

    def locate_samples(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the group of each sample, and its number within the group, counted over the whole run.

        Args:
            samples: Numbers in the run, from 0, ascending.
        """
        if self.num_samples is not None and len(samples) and samples[-1] >= self.num_samples:
            raise DataError(
                f"data: sample {int(samples[-1])} is out of range: data.repeats allows {self.num_samples}; raise a "
                "limit, add a group, or train fewer steps"
            )
        starts = [segment.start for segment in self._segments]
        which = np.searchsorted(starts, samples, side="right") - 1
        groups, ranks = np.empty(len(samples), dtype=np.int64), np.empty(len(samples), dtype=np.int64)
        for number in np.unique(which):
            segment, here = self._segments[number], which == number
            groups[here], segment_ranks = segment.mixture.assign_groups(samples[here] - segment.start)
            ranks[here] = segment_ranks + np.asarray(segment.consumed, dtype=np.int64)[groups[here]]
        return groups, ranks

    def group_consumption(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of the first so many samples of the run each group has."""
        segment = self._segments[bisect_right([segment.start for segment in self._segments], num_samples) - 1]
        segment_counts = segment.mixture.group_counts(num_samples - segment.start)
        return tuple(before + more for before, more in zip(segment.consumed, segment_counts, strict=True))

    def phase_numbers(self, samples: NDArray[np.int64]) -> list[int]:
        """Return the number of each sample's phase, from 0."""
        ends = [start for start, _ in self.starts[1:]]
        return [bisect_right(ends, sample) for sample in samples.tolist()]

    def attention_spans(self, samples: NDArray[np.int64]) -> list[int | None]:
        """Return how many tokens attention spans in each sample's phase."""
        return [self.phases[number].span for number in self.phase_numbers(samples)]

    def _lay_out(self) -> int | None:
        start, consumed = 0, (0,) * len(self.sizes)
        for phase in self.phases:
            self.starts.append((start, consumed))
            for segment, stop in self._cut_phase(phase, start, consumed):
                self._segments.append(segment)
                if stop is None:
                    return None
                counts = segment.mixture.group_counts(stop - segment.start)
                start, consumed = stop, tuple(a + b for a, b in zip(segment.consumed, counts, strict=True))
            if phase.until is None or start < phase.until:
                return start
        return start

    def _cut_phase(self, phase: Phase, start: int, consumed: tuple[int, ...]) -> Iterator[tuple[_Segment, int | None]]:
        """Cut a phase where a group reaches its limit; a part without an end has None."""
        while phase.until is None or start < phase.until:
            remaining = [None if top is None else top - had for top, had in zip(self._limits, consumed, strict=True)]
            weights = tuple(0.0 if rest == 0 else weight for weight, rest in zip(phase.weights, remaining, strict=True))
            if not any(weights):
                return
            segment = _Segment(start, mixture_of(weights), consumed)
            ends = [
                segment.mixture.samples_until(group, rest)
                for group, rest in enumerate(remaining)
                if rest is not None and weights[group]
            ]
            stops = [start + phase_end for phase_end in ends if phase_end is not None]
            if phase.until is not None:
                stops.append(phase.until)
            if not stops:
                yield segment, None
                return
            stop = min(stops)
            yield segment, stop
            counts = segment.mixture.group_counts(stop - start)
            start, consumed = stop, tuple(a + b for a, b in zip(consumed, counts, strict=True))
