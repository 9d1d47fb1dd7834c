"""The paper's two tables: the cells of each, and their summary over the seeds."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from types import MappingProxyType
from typing import Any

from phalanx.lab.reproduce.arms import ARMS, HONEST
from phalanx.lab.reproduce.attacker import KINDS, Direction
from phalanx.lab.reproduce.cell import Row, TableCell
from phalanx.lab.reproduce.workload import TableSize

_FIRST_ARMS = ("clean", "attacked", "phalanx")
_OVERFIT_ARMS = ("clean", "clean_early_stopping", "oracle_drop", "skip_layer")
_MORE_OVERFIT_ARMS = ("attacked", "phalanx")
_Attack = tuple[Direction | None, float | None]
_Place = tuple[str, str]
_NOBODY: tuple[_Attack, ...] = ((None, None),)
_GROUP = ("family", "domain", "regime", "arm", "direction", "rate")


def vulnerability_cells(size: TableSize) -> Iterator[TableCell]:
    """Table 1: clean against attacked, with the gradient clipped and not."""
    regimes = product(_family_domains(size), ("plain", "unclipped"))
    cells = (_arm_cells(("clean", "attacked"), place, regime, size) for place, regime in regimes)
    yield from sorted(chain.from_iterable(cells), key=_sort_key)


def defence_cells(size: TableSize) -> Iterator[TableCell]:
    """Table 2: every arm; when overfitted, the arms for the claim that a defence improves the model."""
    yield from sorted(
        chain.from_iterable(_defended_cells(place, size) for place in _family_domains(size)), key=_sort_key
    )


def _defended_cells(place: _Place, size: TableSize) -> Iterator[TableCell]:
    yield from _arm_cells(tuple(ARMS), place, "plain", size)
    overfit = _OVERFIT_ARMS if len(size.rates) == 1 else _OVERFIT_ARMS + _MORE_OVERFIT_ARMS
    for seed in size.seeds:
        yield from _cells_of(overfit, place, "overfit", seed, (("forward", size.rates[0]),))


def _sort_key(cell: TableCell) -> tuple[bool, bool, int]:
    """What is compared above all comes first in all places, seed by seed, for the whole takes long."""
    return cell.arm not in _FIRST_ARMS, cell.regime == "overfit", cell.seed


CELLS: Mapping[str, Callable[[TableSize], Iterator[TableCell]]] = MappingProxyType(
    {"vulnerability": vulnerability_cells, "defence": defence_cells}
)
"""By the name of the table."""


def rows_with_clean_text(rows: Sequence[Row]) -> list[Row]:
    """Leave out rows that are compared with a clean training on another text."""
    texts = {_training_key(row): row["corpus_digest"] for row in rows if row["arm"] == "clean"}
    return [row for row in rows if texts.get(_training_key(row), row["corpus_digest"]) == row["corpus_digest"]]


def summarise_cells(rows: Sequence[Row]) -> list[Row]:
    """One line for each cell, over its seeds: mean and least and most; None where nothing was measured."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in _GROUP), []).append(row)
    clean = {_training_key(row): row["weights_digest"] for row in rows if row["arm"] == "clean"}
    return [
        {
            **dict(zip(_GROUP, group, strict=True)),
            "seeds": len(members),
            "diverged": sum(row["status"] == "diverged" for row in members),
            **_spread_columns("perplexity_best", members),
            **_spread_columns("perplexity_last", members),
            **{name: _mean_or_none(row[name] for row in members) for name in ("steps", "attacked_steps", *_COUNTS)},
            "evicted": _mean_or_none(len(row["evicted"]) for row in members),
            "same_bits_as_clean": _same_bits(members, clean),
        }
        for group, members in groups.items()
    ]


_COUNTS = ("dropped_steps", "redone_steps", "lies", "lies_missed", "alarms", "honest_accused")


def as_tables(summary: Sequence[Row]) -> dict[str, list[dict[str, str]]]:
    """The summary for people, a table for each model, domain and regime: an arm a line, an attack a column.

    Returns:
        By title: lines of best / last perplexity; below, where there are several seeds, least-most of both.
    """
    tables: dict[str, dict[str, dict[str, str]]] = {}
    for row in summary:
        lines = tables.setdefault(", ".join(row[name] for name in ("family", "domain", "regime")), {})
        table_row = lines.setdefault(row["arm"], {"arm": row["arm"]})
        table_row[_column_name(row)] = _format_figures(row)
    return {title: list(lines.values()) for title, lines in tables.items()}


def _family_domains(size: TableSize) -> Iterator[_Place]:
    yield from product(size.all_families, size.domains)


def _arm_cells(arms: Sequence[str], place: _Place, regime: str, size: TableSize) -> Iterator[TableCell]:
    for seed in size.seeds:
        yield from _cells_of(arms, place, regime, seed, _attack_choices(size.rates))


def _attack_choices(rates: Sequence[float]) -> tuple[_Attack, ...]:
    return tuple(product(KINDS, rates))


def _cells_of(
    arms: Iterable[str], place: _Place, regime: str, seed: int, attacks: tuple[_Attack, ...]
) -> Iterator[TableCell]:
    family, domain = place
    for arm in arms:
        for direction, rate in _NOBODY if arm in HONEST else attacks:
            yield TableCell(family, domain, regime, seed, arm, direction, rate)


def _training_key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("family", "domain", "regime", "seed"))


def _same_bits(rows: Sequence[Row], clean: Mapping[tuple[Any, ...], str | None]) -> int | None:
    comparable = [
        row for row in rows if row["weights_digest"] is not None and clean.get(_training_key(row)) is not None
    ]
    return sum(row["weights_digest"] == clean[_training_key(row)] for row in comparable) if comparable else None


def _spread_columns(name: str, rows: Sequence[Row]) -> Row:
    values = [row[name] for row in rows if row[name] is not None]
    if not values:
        return {name: None, f"{name}_min": None, f"{name}_max": None}
    return {name: sum(values) / len(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def _mean_or_none(values: Iterable[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None


def _column_name(row: Row) -> str:
    return "no attack" if row["direction"] is None else f"{row['direction']} {row['rate']}"


def _format_figures(row: Row) -> str:
    names = ("perplexity_best", "perplexity_last")
    means = " / ".join("-" if row[name] is None else f"{row[name]:.1f}" for name in names)
    if row["seeds"] == 1 or None in (row[name] for name in names):
        return means
    spreads = " / ".join(f"{row[f'{name}_min']:.1f}-{row[f'{name}_max']:.1f}" for name in names)
    return f"{means}\n{spreads}"
