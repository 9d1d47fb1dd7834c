"""The tables of Lu et al. 2023 at CPU sizes, with the arms, seeds and baselines that the paper leaves out."""

import os
import sys
from pathlib import Path
from typing import Any

from phalanx.bench.machine import current_commit, describe_machine, load_average
from phalanx.bench.row_file import sweep
from phalanx.pipeline import keep_freed_memory
from phalanx.reproduce.sweep import PROTOCOL, Trainer, in_words, rows_in
from phalanx.reproduce.tables import CELLS, as_tables, summarise
from phalanx.reproduce.texts import DOMAINS
from phalanx.reproduce.workload import FULL, QUICK, describe
from phalanx.train.process import deterministic

__all__ = ["CELLS", "as_tables", "reproduce"]


def reproduce(table: str, *, quick: bool, only_finished: bool = False) -> dict[str, Any]:
    """Train what a table needs and has not been trained yet; progress goes to standard error.

    Args:
        table: A name in `CELLS`.
        quick: One seed, family, domain and rate, fewer steps; ends within 10 minutes on 2 cores.
        only_finished: Train nothing; show what earlier calls have finished.

    Returns:
        Raw rows, their summary over the seeds, and everything that decided them.

    Raises:
        PhalanxError: Text or model cannot be had, or training cannot go on.
    """
    size = QUICK if quick else FULL
    cache = Path(os.environ.get("PHALANX_CACHE", Path("runs") / ".cache"))
    load = load_average()
    cells = list(CELLS[table](quick))
    finished = rows_in(cache / "reproduce" / "rows.jsonl", size)
    with deterministic(threads=1):
        keep_freed_memory()
        trainer = None if only_finished else Trainer(size, cache, _say)
        rows = list(sweep(cells, finished, trainer, lambda *told: _say(in_words(*told))))
    return {
        "name": table,
        "quick": quick,
        "command": f"phalanx reproduce {table}{' --quick' if quick else ''}",
        "machine": describe_machine(),
        "commit": current_commit(),
        "load": load,
        "protocol": {"number": PROTOCOL, "domains": dict(DOMAINS), **describe(size)},
        "missing": len(cells) - len(rows),
        "summary": summarise(rows),
        "rows": rows,
    }


def _say(text: str) -> None:
    sys.stderr.write(f"reproduce: {text}\n")
    sys.stderr.flush()
