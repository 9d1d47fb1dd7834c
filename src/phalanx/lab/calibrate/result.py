"""The result of a calibration: rows, thresholds with their bound, and the tolerance to write into a run file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.lab.calibrate.measure import DIRECTIONS, PairFigures
from phalanx.lab.calibrate.operators import OPERATORS
from phalanx.lab.calibrate.paths import PathPair
from phalanx.lab.calibrate.tail import Tail, fit_tail
from phalanx.planner.schedules import Direction

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
