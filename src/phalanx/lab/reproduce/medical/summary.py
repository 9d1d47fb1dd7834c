"""Means over the seeds with Student's intervals, and whether the sealed split meets its aim."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

Row = dict[str, Any]

_T: Mapping[int, float] = MappingProxyType(
    {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
)
"""Two-sided 95 % quantiles of Student's t by degrees of freedom."""
_PAIRS = (
    ("split_sealed", "fedavg"),
    ("split_sealed", "split_plain"),
    ("split_sealed", "centralised"),
    ("fedavg_secure", "fedavg"),
    ("fedavg_private", "fedavg"),
    ("fedavg_attacked", "fedavg"),
    ("fedavg_robust", "fedavg"),
)
_MASKED = ("split_masked", "split_sealed")


def half_width(values: Sequence[float]) -> float | None:
    """Return half of the 95 % confidence interval of the mean; None for fewer than two values, or more than ten."""
    quantile = _T.get(len(values) - 1)
    return None if quantile is None else quantile * stdev(values) / math.sqrt(len(values))


def summarise_medical(rows: Sequence[Row]) -> list[Row]:
    """One line for each task and arm, over its seeds; None where nothing was measured."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["arm"]), []).append(row)
    return [
        {
            "task": task,
            "arm": arm,
            "seeds": sum(row["accuracy"] is not None for row in members),
            **_mean_and_width("accuracy", members),
            **_mean_and_width("macro_f1", members),
            "majority": _mean_or_none(row.get("majority") for row in members),
            "cpu_s": _mean_or_none(row.get("cpu_s") for row in members),
            "note": next((row["note"] for row in members if row.get("note")), None),
        }
        for (task, arm), members in groups.items()
    ]


def compare_arms(rows: Sequence[Row]) -> list[Row]:
    """One line for each task and pair of arms: the difference of accuracies, paired by seed.

    `at_least` says whether the first arm's mean is at least the second's, `beyond_interval` whether the interval of the
    difference has one sign; `same_bits` counts seeds in which losses and weights of both are equal bit for bit.
    """
    by_cell = {(row["task"], row["arm"], row["seed"]): row for row in rows if row["accuracy"] is not None}
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    differences = []
    for task in tasks:
        for first, second in (*_PAIRS, _MASKED):
            seeds = [
                seed for name, arm, seed in by_cell if (name, arm) == (task, first) and (task, second, seed) in by_cell
            ]
            if seeds:
                pairs = [(by_cell[task, first, seed], by_cell[task, second, seed]) for seed in seeds]
                differences.append({"task": task, "arm": first, "against": second, **_paired_difference(pairs)})
    return differences


def as_tables(summary: Sequence[Row]) -> dict[str, list[dict[str, str]]]:
    """The summary for people: by task, an arm a line."""
    tables: dict[str, list[dict[str, str]]] = {}
    for row in summary:
        table_row = {
            "arm": row["arm"],
            "accuracy": _format_interval(row, "accuracy"),
            "macro-F1": _format_interval(row, "macro_f1"),
            "seeds": str(row["seeds"]),
            "note": row["note"] or "",
        }
        tables.setdefault(row["task"], []).append(table_row)
    return tables


def _paired_difference(pairs: Sequence[tuple[Row, Row]]) -> Row:
    values = [first["accuracy"] - second["accuracy"] for first, second in pairs]
    mean, half = fmean(values), half_width(values)
    digests = ("weights_digest", "losses_digest")
    same = [all(first.get(name) and first.get(name) == second.get(name) for name in digests) for first, second in pairs]
    return {
        "seeds": len(values),
        "difference": mean,
        "difference_half_width": half,
        "at_least": mean >= 0,
        "beyond_interval": None if half is None else abs(mean) > half,
        "same_bits": sum(same),
    }


def _mean_and_width(name: str, rows: Sequence[Row]) -> Row:
    values = [row[name] for row in rows if row[name] is not None]
    return {name: _mean_or_none(values), f"{name}_half_width": half_width(values)}


def _mean_or_none(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _format_interval(row: Row, name: str) -> str:
    if row[name] is None:
        return "-"
    half = row[f"{name}_half_width"]
    return f"{row[name]:.3f}" if half is None else f"{row[name]:.3f} ± {half:.3f}"
