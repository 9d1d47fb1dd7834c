"""The leak table: the best attack's recovery at each cut under each guard, with chance beside it."""

from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.lab.reproduce.leaks.lab import ATTACKS, LeakCell, Row
from phalanx.lab.reproduce.leaks.size import LeakSize
from phalanx.redteam.inversion import WIRES


def cells_of(size: LeakSize) -> Iterator[LeakCell]:
    """What is measured, guard by guard, so that the plaintext column is complete first."""
    for guard in WIRES:
        for depth in size.depths:
            yield LeakCell(depth, guard)


def summarise_leaks(rows: Sequence[Row]) -> list[Row]:
    """One line for each cut.

    Returns:
        ``depth``, ``chance``, under each guard the share of tokens that the best attack recovers and, as
        ``GUARD_attack``, its name; and each attack's share in plaintext. None where nothing was measured.
    """
    lines: dict[int, Row] = {}
    for row in rows:
        row_of_depth = lines.setdefault(row["depth"], _empty_row(row))
        row_of_depth["chance"] = max(row_of_depth["chance"], row["chance"], row["searched_chance"])
        best = max(ATTACKS, key=lambda name: float(row[name]))
        row_of_depth |= {row["guard"]: row[best], f"{row['guard']}_attack": best}
        if row["guard"] == "plaintext":
            row_of_depth |= {name: row[name] for name in ATTACKS}
        lines[row["depth"]] = row_of_depth
    return [lines[depth] for depth in sorted(lines)]


def as_lines(summary: Sequence[Row]) -> list[dict[str, str]]:
    """The summary for people, in percent."""
    return [
        {
            "cut": str(table_row["depth"]),
            "plaintext": _format_percent(table_row["plaintext"]),
            "by": table_row["plaintext_attack"] or "-",
            "sealed": _format_percent(table_row["sealed"]),
            "masked": _format_percent(table_row["masked"]),
            "chance": _format_percent(table_row["chance"]),
            **{name.replace("_", " "): _format_percent(table_row[name]) for name in ATTACKS},
        }
        for table_row in summary
    ]


def adapter_lines(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Rows of adapter gradients for people: a line for each size of a batch, a column for each guard."""
    lines: dict[int, dict[str, str]] = {}
    for row in rows:
        table_row = lines.setdefault(
            row["tokens"], {"tokens of the batch": str(row["tokens"]), "rank": str(row["rank"])}
        )
        table_row[row["guard"]] = _format_percent(row["recall"])
    return list(lines.values())


def _empty_row(row: Row) -> Row:
    names: list[str] = [*WIRES, *(f"{guard}_attack" for guard in WIRES), *ATTACKS]
    return {"depth": row["depth"], "chance": 0.0, **dict.fromkeys(names)}


def _format_percent(value: Any) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
