"""The result of a calibration: rows, thresholds with their bound, and the tolerance to write into a run file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.lab.calibrate.measure import DIRECTIONS, PairFigures
from phalanx.lab.calibrate.operators import OPERATORS
from phalanx.lab.calibrate.paths import PathPair
from phalanx.planner.schedules import Direction

_FEWEST = 20
"""Exceedances without which no tail is fitted."""

_Z95 = 1.6449
"""Normal quantile of one-sided 95 % confidence."""


@dataclass(frozen=True)
class Tail:
    """Peaks over a threshold u, as logarithms: how many there are, and how far beyond they lie on average.

    The bound on the share of messages beyond tau is ``p exp(-w t)`` with ``t = log(tau / u)``, where w solves
    ``1 - w m = exp(-w t)``; p bounds the share beyond u and m the mean of ``log(e / u)`` there, each
    with 95 % confidence.

    Guarantees:
        Holds for messages drawn alike and independently, if the generalised failure rate ``e h(e)`` of their
        largest token distance does not fall beyond u: normal, exponential, Gumbel, log-normal, bounded and pure
        Pareto tails. Says nothing of honest paths that were not measured.

    Source: Barlow and Marshall 1964, Bounds for distributions with monotone hazard rate, Annals of
    Mathematical Statistics 35, for the bound; Hill 1975 for the mean logarithm as a measure of a tail.
    """

    num_messages: int
    num_beyond: int
    start: float
    """u, the largest distance that is not counted as beyond."""
    share_beyond: float
    """p."""
    mean_log_excess: float
    """m."""

    def share_above(self, tau: float) -> float:
        """Upper bound on the share of honest messages with a distance beyond tau; 1 below `start`."""
        if not tau >= self.start:
            return 1.0
        t, m = math.log(tau / self.start), self.mean_log_excess
        if t <= m:
            return self.share_beyond
        rate = 1.0 / m
        for _ in range(200):
            rate = -math.expm1(-rate * t) / m
        return self.share_beyond * math.exp(-rate * t)

    def threshold_for(self, share: float) -> float:
        """Smallest tau, to one part in a thousand, beyond which at most this share of honest messages lies."""
        low = high = self.start
        while self.share_above(high) > share:
            low, high = high, high * 2.0
        while high > low * 1.001:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.share_above(middle) > share else (low, middle)
        return high


def fit_tail(maxima: Sequence[float]) -> Tail | None:
    """Fit the largest tenth of the messages, at least 20 of them.

    Args:
        maxima: Largest token distance of each message; finite.

    Returns:
        None when fewer than 20 messages stand out from the rest: too few, or nearly all of them bit-equal.
    """
    ordered = sorted(maxima, reverse=True)
    num_tail = max(_FEWEST, len(ordered) // 10)
    if len(ordered) <= num_tail or ordered[num_tail] <= 0.0:
        return None
    start = ordered[num_tail]
    excesses = [math.log(value / start) for value in ordered[:num_tail]]
    mean = sum(excesses) / num_tail
    if mean <= 0.0:
        return None
    n, k = len(ordered), num_tail
    # the share beyond the (k+1)-th largest of n is a Beta(k+1, n-k) variable, whatever the distribution
    share = (k + 1) / (n + 1)
    share += _Z95 * math.sqrt(share * (1.0 - share) / (n + 2))
    # exact for exponential excesses, wide for lighter tails: the sum of k of them is chi-square with 2k degrees
    return Tail(n, k, start, min(share, 1.0), mean * 2 * k / _chi_square_5_percent(2 * k))


def _chi_square_5_percent(degrees: int) -> float:
    """Lower 5 % quantile, by the cube-root approximation: exact to 1 part in 1000 from 40 degrees on.

    Source: Wilson and Hilferty 1931.
    """
    spread = 2.0 / (9.0 * degrees)
    return float(degrees * (1.0 - spread - _Z95 * math.sqrt(spread)) ** 3)


PER_MILLION = 1e6
_STEPS = (1.0, 2.0, 5.0)

Row = dict[str, str | int | float | None]


@dataclass(frozen=True)
class FittedTail:
    """One pair in one direction, and what may be said of its tail.

    `silent` where every message had equal bits: such a pair has no part in any threshold.
    """

    pair: PathPair
    direction: Direction
    silent: bool
    tail: Tail | None

    @property
    def pair_label(self) -> str:
        """For tables and reasons."""
        return f"{self.pair.path.name} against {self.pair.reference.name}, {self.direction}"


def fit_all(figures: Mapping[PathPair, PairFigures]) -> list[FittedTail]:
    """Fit the tail of every pair and direction."""
    fits = []
    for pair, pair_figures in figures.items():
        for direction in DIRECTIONS:
            maxima = pair_figures.messages[direction].maxima
            fits.append(FittedTail(pair, direction, not any(maxima), fit_tail(maxima)))
    return fits


def message_rows(figures: Mapping[PathPair, PairFigures], fits: Sequence[FittedTail], tolerance: float) -> list[Row]:
    """One row for each pair and direction; `tolerance` is the run's own tau."""
    rows = []
    for fit in fits:
        pair_figures, tail = figures[fit.pair], fit.tail
        row: Row = {
            "precision": fit.pair.coarser_precision,
            "path": fit.pair.path.name,
            "reference": fit.pair.reference.name,
            "direction": fit.direction,
        }
        row |= (
            pair_figures.messages[fit.direction].difference_figures()
            | pair_figures.leaning[fit.direction].lean_figures()
        )
        row["tau_1_per_million"] = None if tail is None else tail.threshold_for(1 / PER_MILLION)
        row["per_million_at_tolerance"] = None if tail is None else PER_MILLION * tail.share_above(tolerance)
        rows.append(row)
    return rows


def operator_rows(figures: Mapping[PathPair, PairFigures]) -> list[Row]:
    """One row for each pair and kind of operator that the model has; forward only."""
    rows = []
    for pair, pair_figures in figures.items():
        for kind in (kind for kind in OPERATORS if pair_figures.operators[kind].maxima):
            row: Row = {"path": pair.path.name, "reference": pair.reference.name, "operator": kind}
            row |= {
                key.replace("messages", "outputs"): value
                for key, value in pair_figures.operators[kind].difference_figures().items()
            }
            rows.append(row)
    return rows


def threshold_rows(fits: Sequence[FittedTail]) -> list[Row]:
    """Round thresholds of each precision, with the bound of its worst pair.

    From the largest one that is certain to fail to the first that at most one honest message in a million
    exceeds. Where the tail of any pair could not be fitted, the bound is None.
    """
    rows = []
    for precision in dict.fromkeys(fit.pair.coarser_precision for fit in fits):
        loud = [fit for fit in fits if fit.pair.coarser_precision == precision and not fit.silent]
        tails = [(fit.pair_label, fit.tail) for fit in loud if fit.tail is not None]
        complete = len(tails) == len(loud)
        for tau in _round_numbers([tail for _, tail in tails]):
            worst, share = max(((name, tail.share_above(tau)) for name, tail in tails), key=lambda item: item[1])
            row: Row = {"precision": precision, "tau": tau}
            row |= {"per_million": PER_MILLION * share if complete else None, "worst": worst if complete else None}
            rows.append(row)
    return rows


def suggest_tolerance(rows: Sequence[Row], fits: Sequence[FittedTail], precision: str) -> dict[str, Any]:
    """The tolerance for a run's precision, or why there is none.

    Args:
        rows: Rows made by `thresholds`.
    """
    mine = [fit for fit in fits if fit.pair.coarser_precision == precision]
    loose = [fit.pair_label for fit in mine if not fit.silent and fit.tail is None]
    if loose:
        return {"tolerance": None, "reason": f"too few unequal messages to fit a tail: {'; '.join(loose)}"}
    if all(fit.silent for fit in mine):
        return {"tolerance": None, "reason": "every path gave equal bits; keep the tolerance that you have"}
    for row in rows:
        per_million, tau = row["per_million"], row["tau"]
        if row["precision"] == precision and isinstance(per_million, float) and per_million <= 1.0:
            return {"tolerance": tau, "reason": f"at most {per_million:.2g} honest messages in a million are beyond it"}
    return {"tolerance": None, "reason": "no threshold below 1 keeps false alarms under one in a million"}


def _round_numbers(tails: Sequence[Tail]) -> list[float]:
    """1, 2, 5, 10 ...: the last is the first that every tail puts at most one message in a million beyond."""
    taus = []
    start = max((tail.start for tail in tails), default=1.0)
    for exponent in range(-16, 0):
        for digit in _STEPS:
            tau = float(f"{digit:.0f}e{exponent}")
            if tau >= start:
                taus.append(tau)
                if all(tail.share_above(tau) * PER_MILLION <= 1.0 for tail in tails):
                    return taus
    return taus
