"""The leak table: how much of the text the host recovers from each cut, under each guard, measured here."""

import importlib.metadata
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.errors import ConfigError
from phalanx.lab.bench.measure.harness import cache_directory, print_progress
from phalanx.lab.bench.measure.machine import load_average, reproduce_head
from phalanx.lab.bench.measure.row_file import RowFile, sweep_cells
from phalanx.lab.reproduce.leaks.adapters import AdapterCell, AdapterLab, adapter_cells
from phalanx.lab.reproduce.leaks.lab import ATTACKS, LeakLab, LeakCell, Row, open_source_and_texts
from phalanx.lab.reproduce.leaks.size import MODEL, SIZES, LeakSize, describe_leak_size
from phalanx.lab.reproduce.leaks.table import adapter_lines, as_lines, cells_of, summarise_leaks
from phalanx.lab.reproduce.leaks.texts import TEXTS
from phalanx.planner.cluster.catalog import known_models
from phalanx.train.setup.process import deterministic_kernels

__all__ = ["ATTACKS", "SIZES", "adapter_lines", "as_lines", "measure_leaks", "open_leak_rows", "summarise_leaks"]

_print_leaks = partial(print_progress, program="leaks")
PROTOCOL = 1
"""To be raised with every change of the code that changes a figure: older rows are then not used again."""


def measure_leaks(*, size: str = "full", only_finished: bool = False) -> dict[str, Any]:
    """Measure missing cells; progress goes to standard error.

    Args:
        only_finished: Measure nothing; show what earlier calls have finished.
    """
    if size not in SIZES:
        raise ConfigError(f"reproduce leaks: has no --{size}; choices: {', '.join(sorted(SIZES))}")
    chosen = SIZES[size]
    cache = cache_directory()
    load, cells = load_average(), list(cells_of(chosen))
    batches = list(adapter_cells(chosen))
    finished = open_leak_rows(cache / "reproduce" / "leaks.jsonl", chosen)
    adapter_rows = _adapter_rows_in(cache / "reproduce" / "leaks-adapters.jsonl", chosen)
    lab: LeakLab | None = None
    adapters: AdapterLab | None = None
    with deterministic_kernels(threads=1):
        if not only_finished:
            source, texts = open_source_and_texts(chosen, cache)
            lab, adapters = LeakLab(chosen, source, texts, _print_leaks), AdapterLab(source, texts)
        rows = list(sweep_cells(cells, finished, lab, _print_leak))
        gradients = list(sweep_cells(batches, adapter_rows, adapters, _tell_gradient))
    shape = known_models()[MODEL]
    return {
        **reproduce_head("leaks", size, load),
        "model": {"name": MODEL, "layers": shape.layers, "hidden": shape.hidden, "vocab": shape.vocab},
        "protocol": {"number": PROTOCOL, "texts": TEXTS, **describe_leak_size(chosen)},
        "missing": len(cells) + len(batches) - len(rows) - len(gradients),
        "summary": summarise_leaks(rows),
        "adapters": gradients,
        "rows": rows,
    }


def open_leak_rows(path: Path, size: LeakSize) -> RowFile[LeakCell]:
    """Cells that are finished at this size with this protocol."""
    versions = [importlib.metadata.version(name) for name in ("numpy", "cryptography")]
    return RowFile(path, lambda cell: [PROTOCOL, versions, describe_leak_size(size), cell.depth, cell.guard])


def _adapter_rows_in(path: Path, size: LeakSize) -> RowFile[AdapterCell]:
    versions = [importlib.metadata.version(name) for name in ("numpy", "cryptography")]
    return RowFile(path, lambda cell: [PROTOCOL, versions, describe_leak_size(size), cell.tokens, cell.guard])


def _print_leak(place: str, cell: LeakCell, row: Row) -> None:
    shown = ", ".join(f"{name.replace('_', ' ')} {100 * row[name]:.1f} %" for name in ATTACKS)
    _print_leaks(f"{place}: {cell.leak_label}: {shown}; chance {100 * row['chance']:.1f} %, {row['wall_s']:.0f} s")


def _tell_gradient(place: str, cell: AdapterCell, row: Row) -> None:
    _print_leaks(f"{place}: {cell.adapter_label}: {100 * row['recall']:.0f} % of its tokens found")
