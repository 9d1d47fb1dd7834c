"""The tables of Lu et al. 2023 at CPU sizes, with the arms, seeds and baselines that the paper leaves out."""

from functools import partial
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.harness import cache_directory, print_progress
from phalanx.lab.bench.measure.machine import load_average, reproduce_head
from phalanx.lab.bench.measure.row_file import sweep_cells
from phalanx.lab.reproduce.tables import CELLS, as_tables, rows_with_clean_text, summarise_cells
from phalanx.lab.reproduce.texts import DOMAINS
from phalanx.lab.reproduce.trainer import PROTOCOL, TableTrainer, describe_training, open_table_rows
from phalanx.lab.reproduce.workload import SIZES, describe_table_size
from phalanx.pipeline import keep_freed_memory
from phalanx.train.setup.process import deterministic_kernels

__all__ = ["CELLS", "SIZES", "as_tables", "reproduce"]


def reproduce(
    table: str, *, size: str = "full", only_finished: bool = False, home: Path | None = None
) -> dict[str, Any]:
    """Train the missing cells of a table; progress goes to standard error.

    Args:
        table: A name in `CELLS`.
        size: A name in `SIZES`.
        only_finished: Train nothing; show what earlier calls have finished.
        home: Directory of data files; None looks in the usual places.
    """
    chosen, say = SIZES[size], partial(print_progress, program="reproduce")
    cache = cache_directory()
    load = load_average()
    cells = list(CELLS[table](chosen))
    path = cache / "reproduce" / "rows.jsonl"
    with deterministic_kernels(threads=1):
        keep_freed_memory()
        trainer = None if only_finished else TableTrainer(chosen, cache, say, home)
        finished = (
            open_table_rows(path, chosen) if trainer is None else open_table_rows(path, chosen, trainer.has_same_text)
        )
        rows = rows_with_clean_text(
            list(sweep_cells(cells, finished, trainer, lambda *told: say(describe_training(*told))))
        )
    return {
        **reproduce_head(table, size, load),
        "protocol": {
            "number": PROTOCOL,
            "domains": {name: DOMAINS[name] for name in chosen.domains},
            **describe_table_size(chosen),
        },
        "missing": len(cells) - len(rows),
        "summary": summarise_cells(rows),
        "rows": rows,
    }
