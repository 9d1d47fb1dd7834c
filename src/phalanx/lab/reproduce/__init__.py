"""The tables of Lu et al. 2023 at CPU sizes, with the arms, seeds and baselines that the paper leaves out."""

import os
import sys
from pathlib import Path
from typing import Any

from phalanx.lab.bench.measure.machine import load_average, taken_on
from phalanx.lab.bench.measure.row_file import sweep
from phalanx.lab.reproduce.tables import CELLS, as_tables, of_one_text, summarise
from phalanx.lab.reproduce.texts import DOMAINS
from phalanx.lab.reproduce.trainer import PROTOCOL, Trainer, in_words, rows_in
from phalanx.lab.reproduce.workload import SIZES, describe
from phalanx.pipeline import keep_freed_memory
from phalanx.train.setup.process import deterministic

__all__ = ["CELLS", "SIZES", "as_tables", "reproduce"]


def reproduce(table: str, *, size: str = "full", only_finished: bool = False) -> dict[str, Any]:
    """Train the missing cells of a table; progress goes to standard error.

    Args:
        table: A name in `CELLS`.
        size: A name in `SIZES`: "full", "small" with the same cells, or "quick" with one seed, family, domain and rate.
        only_finished: Train nothing; show what earlier calls have finished.

    Returns:
        Raw rows, their summary over the seeds, and everything that decided them.

    Raises:
        PhalanxError: Text or model cannot be had, or training cannot go on.
    """
    quick, chosen = size == "quick", SIZES[size]
    cache = Path(os.environ.get("PHALANX_CACHE", Path("runs") / ".cache"))
    load = load_average()
    cells = list(CELLS[table](quick))
    path = cache / "reproduce" / "rows.jsonl"
    with deterministic(threads=1):
        keep_freed_memory()
        trainer = None if only_finished else Trainer(chosen, cache, _say)
        finished = rows_in(path, chosen) if trainer is None else rows_in(path, chosen, trainer.has_same_text)
        rows = of_one_text(list(sweep(cells, finished, trainer, lambda *told: _say(in_words(*told)))))
    return {
        "name": table,
        "quick": quick,
        "size": size,
        "command": f"phalanx reproduce {table}{'' if size == 'full' else f' --{size}'}",
        **taken_on(load),
        "protocol": {"number": PROTOCOL, "domains": dict(DOMAINS), **describe(chosen)},
        "missing": len(cells) - len(rows),
        "summary": summarise(rows),
        "rows": rows,
    }


def _say(text: str) -> None:
    sys.stderr.write(f"reproduce: {text}\n")
    sys.stderr.flush()
