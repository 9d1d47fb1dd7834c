"""The order of a run: sample k is computed from seed, sizes, phases and k alone."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.config import canonical_json
from phalanx.data.order.group_order import GroupOrder, Leg, Scores
from phalanx.data.order.schedule import Phase, PhaseSchedule

_HEX_OF_53_BITS = 13


@dataclass(frozen=True)
class Group:
    """Sequences that are mixed as one source.

    Attributes:
        name: Name in the run file; empty where a corpus is one group.
        size: Sequences, at least 1.
        digest: SHA-256 in hex of all that decides what its sequences are.
        scores: Gives a score of each sequence, for a curriculum.
    """

    name: str
    size: int
    digest: str
    scores: Scores = field(compare=False, repr=False)

    @property
    def identity_numbers(self) -> list[int]:
        """Sequences, and as many bits of the digest as every reader of JSON keeps whole."""
        return [self.size, int(self.digest[:_HEX_OF_53_BITS], 16)]


@dataclass(frozen=True)
class PhaseCount:
    """The draws of a phase: its samples, and the sequences they come from, a share `amount` of its groups."""

    amount: float
    num_sequences: int
    num_samples: int


class RunOrder:
    """Which sequence each sample of a run is; nothing of it is stored, and nothing is counted up from the beginning.

    Sequences are numbered over all groups, in the order of the groups.

    Args:
        limits: Samples that each group may give; None for any number.

    Guarantees:
        Every epoch of a group, or of the share of it that a phase draws from, has each sequence exactly once. In every
        prefix of a phase, up to a group's limit, each group has its share of the mixture to less than one sample.
        Neither depends on ranks, batch size or resumes.
    """

    def __init__(
        self, groups: Sequence[Group], phases: Sequence[Phase], seed: int, limits: Sequence[int | None] | None = None
    ) -> None:
        self.groups = tuple(groups)
        self.schedule = PhaseSchedule([group.size for group in groups], phases, limits or [None] * len(groups))
        self._legs = [_group_legs(self.schedule, number) for number in range(len(groups))]
        self._orders = [
            GroupOrder(group.size, seed, group.name, legs, group.scores)
            for group, legs in zip(self.groups, self._legs, strict=True)
        ]
        self._offsets = np.concatenate([[0], np.cumsum([group.size for group in groups])]).astype(np.int64)

    def sample_sequences(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which sequence each sample is.

        Args:
            samples: Numbers in the run, from 0, ascending.
        """
        groups, ranks = self.schedule.locate_samples(samples)
        sequences = np.empty(len(samples), dtype=np.int64)
        for number in np.unique(groups):
            here = groups == number
            sequences[here] = self._offsets[number] + self._orders[number].group_sequences(ranks[here])
        return sequences

    @property
    def is_mixed(self) -> bool:
        """Whether there is more than one permutation of all sequences an epoch: groups by name, curricula or shares."""
        phases = self.schedule.phases
        has_order = any(phase.curriculum is not None or phase.amount < 1 for phase in phases)
        return len(self.groups) > 1 or has_order or self.schedule.num_samples is not None or bool(self.groups[0].name)

    def consumed_by_group(self, num_samples: int) -> dict[str, int]:
        """Return how many of the first so many samples each group has, by name."""
        counts = self.schedule.group_consumption(num_samples)
        return {group.name: count for group, count in zip(self.groups, counts, strict=True)}

    def count_phases(self, num_samples: int) -> list["PhaseCount"]:
        """Count the draws of each phase that begins within the first so many samples."""
        starts = [start for start, _ in self.schedule.starts]
        counts = []
        for phase, start, end in zip(self.schedule.phases, starts, [*starts[1:], num_samples], strict=False):
            drawn_from = sum(
                phase.num_drawn(group.size) for group, weight in zip(self.groups, phase.weights, strict=True) if weight
            )
            if start < num_samples:
                counts.append(PhaseCount(phase.amount, drawn_from, min(end, num_samples) - start))
        return counts

    def mixture_history(self, num_samples: int) -> dict[str, dict[str, Any]]:
        """Return the facts in which a run that goes on behind this many samples must agree with this one.

        Returns:
            For each group that has had a sample: its identity, its count, and a digest of its curricula so far.
        """
        state = {}
        for group, legs, count in zip(
            self.groups, self._legs, self.schedule.group_consumption(num_samples), strict=True
        ):
            if count:
                begun = [[leg.start, *_leg_values(leg)] for leg in legs if leg.start < count]
                state[group.name] = {
                    "identity": group.identity_numbers,
                    "samples": count,
                    "curricula": _digest_bits(begun),
                }
        return state


def _digest_bits(content: object) -> int:
    return int(hashlib.sha256(canonical_json(content)).hexdigest()[:_HEX_OF_53_BITS], 16)


NO_CURRICULA = _digest_bits([[0]])
"""What `RunOrder.mixture_history` says of a group that gave its samples in a random order."""


def _group_legs(schedule: PhaseSchedule, group: int) -> list[Leg]:
    """Return a group's samples by curriculum and amount: one leg for phases in a row that have the same ones."""
    legs: list[Leg] = []
    for (_, consumed), phase in zip(schedule.starts, schedule.phases, strict=False):
        size, num_drawn = schedule.sizes[group], phase.num_drawn(schedule.sizes[group])
        leg = Leg(consumed[group], phase.curriculum, None if num_drawn == size else num_drawn)
        if legs and legs[-1].start == leg.start:
            legs.pop()
        if not legs or replace(legs[-1], start=leg.start) != leg:
            legs.append(leg)
    return legs


def _leg_values(leg: Leg) -> list[object]:
    curriculum = leg.curriculum
    values: list[object] = [] if curriculum is None else [curriculum.by, curriculum.buckets, curriculum.descending]
    return values if leg.share is None else [*values, leg.share]
