"""Figures of a leak, out of losses alone: exposure, membership, and the intervals of both. Loads no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

Interval = tuple[float, float]
_Z = NormalDist().inv_cdf(0.975)
_FOUND_SHARE = 0.95


def loss_rank(loss: float, others: Sequence[float]) -> int:
    """Return the rank of a loss among other losses, from 1; a tie is broken for the others."""
    # a NaN is no evidence of a leak: it compares as the worst rank
    return 1 + sum(not other > loss for other in others)


def exposure_bits(loss: float, candidates: Sequence[float]) -> float:
    """Return log2 of the number of candidates over the rank of a canary's loss; 0 is chance's worst case.

    Args:
        loss: Of the canary, summed over its tokens.

    Source: Carlini et al. 2019 (The Secret Sharer), definition 5.
    """
    return math.log2((len(candidates) + 1) / loss_rank(loss, candidates))


def max_exposure_bits(num_candidates: int) -> float:
    """Return the exposure of a canary that is likelier than every candidate."""
    return math.log2(num_candidates + 1)


def area_under_curve(marked: Sequence[float], others: Sequence[float]) -> float:
    """Return how often a marked score is above another one; ties count half. 0.5 is chance; NaN counts as a tie."""
    first, second = np.asarray(marked, np.float64)[:, None], np.asarray(others, np.float64)[None]
    return float(((first > second) + 0.5 * ~((first > second) | (first < second))).mean())


def area_interval(area: float, num_marked: int, num_others: int) -> Interval:
    """Return the 95 % interval of an area under the curve.

    The area is drawn towards one half by one pair, so that a perfect separation of few rows has an interval too.

    Source: Hanley and McNeil 1982.
    """
    fewest = min(num_marked, num_others)
    shrunk = (area * fewest + 0.5) / (fewest + 1)
    q1, q2 = shrunk / (2 - shrunk), 2 * shrunk**2 / (1 + shrunk)
    spread = shrunk * (1 - shrunk) + (num_marked - 1) * (q1 - shrunk**2) + (num_others - 1) * (q2 - shrunk**2)
    half = _Z * math.sqrt(max(0.0, spread) / (num_marked * num_others))
    return max(0.0, min(area, shrunk - half)), min(1.0, max(area, shrunk + half))


def found_share(marked: Sequence[float], others: Sequence[float], false_share: float) -> float:
    """Return the share of marked scores above all but so small a share of the others."""
    ordered = sorted(others, reverse=True)
    threshold = ordered[min(len(ordered) - 1, int(false_share * len(ordered)))]
    return sum(score > threshold for score in marked) / len(marked)


def true_negative_share(members: Sequence[float], strangers: Sequence[float]) -> float:
    """Return the share of strangers that the loss attack clears where it finds 95 % of the members.

    It orders models as the much dearer attack with shadow models does.

    Source: arXiv 2510.19773.
    """
    threshold = sorted(members)[min(len(members) - 1, math.ceil(_FOUND_SHARE * len(members)) - 1)]
    return sum(loss > threshold for loss in strangers) / len(strangers)


def wilson_interval(successes: float, trials: float, z: float = _Z) -> Interval:
    """Return the interval of a share, exact at 0 and 1; of no trials from 0 to 1.

    Args:
        z: Quantile of the normal distribution, or of Student's t; left out, that of 95 %.

    Source: Wilson 1927.
    """
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, z * z
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))


@dataclass(frozen=True)
class LeakLosses:
    """Losses that a leak is read from, in nats.

    Attributes:
        canaries: Of each planted canary, summed over its tokens.
        candidates: The same of texts of that form that were never planted.
        members: Mean loss of training rows.
        strangers: Mean loss of held-out rows.
    """

    canaries: tuple[float, ...] = ()
    candidates: tuple[float, ...] = ()
    members: tuple[float, ...] = ()
    strangers: tuple[float, ...] = ()

    def read_leak(self) -> dict[str, float]:
        """Return the figures by name, without the ones that were not measured.

        Returns:
            ``exposure_bits`` of the most exposed canary and ``exposure_mean_bits``, ``membership_auc`` of the loss
            attack, and ``true_negatives``, see `true_negative_share`.
        """
        figures: dict[str, float] = {}
        if self.canaries and self.candidates:
            bits = [exposure_bits(loss, self.candidates) for loss in self.canaries]
            figures |= {"exposure_bits": max(bits), "exposure_mean_bits": sum(bits) / len(bits)}
        if self.members and self.strangers:
            lower = [-loss for loss in self.members], [-loss for loss in self.strangers]
            figures["membership_auc"] = area_under_curve(*lower)
            figures["true_negatives"] = true_negative_share(self.members, self.strangers)
        return figures
