"""What each middle stage of a pipeline learns of the text from the messages that it really sees, measured here."""

from dataclasses import asdict
from functools import partial
from typing import Any

from phalanx.data.tasks.task import find_file
from phalanx.errors import ConfigError, DataError
from phalanx.lab.bench.measure.harness import cache_directory, print_progress
from phalanx.lab.bench.measure.machine import load_average, reproduce_head
from phalanx.lab.bench.measure.row_file import RowFile, sweep_cells
from phalanx.lab.reproduce.stage_leaks.lab import Row, StageLeakCell, StageLeakLab
from phalanx.lab.reproduce.stage_leaks.prices import price_boundaries
from phalanx.lab.reproduce.stage_leaks.size import REAL, SIZES, describe_pipeline
from phalanx.lab.reproduce.stage_leaks.table import price_lines, stage_cells, stage_lines, summarise_stages
from phalanx.lab.reproduce.stage_leaks.texts import TEXTS
from phalanx.lab.reproduce.workload import SMALL, architecture_of
from phalanx.pipeline import keep_freed_memory
from phalanx.planner.cluster.catalog import known_models
from phalanx.train.setup.process import deterministic_kernels

__all__ = ["SIZES", "measure_stage_leaks", "price_lines", "stage_lines", "summarise_stages"]

_print_stages = partial(print_progress, program="stage-leaks")
PROTOCOL = 1
"""To be raised with every change of the code that changes a figure: older rows are then not used again."""


def measure_stage_leaks(*, size: str = "full", only_finished: bool = False) -> dict[str, Any]:
    """Measure missing cells; progress goes to standard error.

    Args:
        only_finished: Measure nothing but prices; show what earlier calls have finished.
    """
    if size not in SIZES:
        raise ConfigError(f"reproduce stage-leaks: has no --{size}; choices: {', '.join(sorted(SIZES))}")
    chosen, cache, load = SIZES[size], cache_directory(), load_average()
    cells = list(stage_cells(chosen))
    has_medical = _has_medical_texts()
    finished = RowFile[StageLeakCell](
        cache / "reproduce" / "stage-leaks.jsonl",
        lambda cell: [PROTOCOL, describe_pipeline(chosen.pipelines[cell.model]), has_medical, asdict(cell)],
    )
    with deterministic_kernels(threads=1):
        keep_freed_memory()
        lab = None if only_finished else StageLeakLab(chosen, cache, _print_stages)
        rows = list(sweep_cells(cells, finished, lab, _print_row))
        prices = price_boundaries()
    return {
        **reproduce_head("stage-leaks", size, load),
        "models": {name: _shape_of(name) for name in chosen.pipelines},
        "protocol": {
            "number": PROTOCOL,
            "texts": TEXTS,
            "pipelines": {name: describe_pipeline(pipeline) for name, pipeline in chosen.pipelines.items()},
        },
        "missing": len(cells) - len(rows),
        "prices": prices,
        "summary": summarise_stages(rows),
        "rows": rows,
    }


def _shape_of(name: str) -> dict[str, int]:
    if name == REAL:
        shape = known_models()[REAL]
        return {"layers": shape.layers, "hidden": shape.hidden, "vocab": shape.vocab}
    config = architecture_of("gpt2", SMALL.width)
    return {key: int(str(config[key_there])) for key, key_there in _GPT2_KEYS.items()}


_GPT2_KEYS = {"layers": "n_layer", "hidden": "n_embd", "vocab": "vocab_size"}


def _has_medical_texts() -> bool:
    try:
        return all(find_file(None, name, "") for name in ("medquad.jsonl.gz", "wikitext2_valid.txt.gz"))
    except DataError:
        return False


def _print_row(place: str, cell: StageLeakCell, row: Row) -> None:
    shown = "; ".join(
        f"stage {line['stage']}: tokens {100 * max(share or 0.0 for share in line['tokens'].values()):.0f} %, "
        f"next tokens {100 * max(line['labels'].values()):.0f} %"
        for line in row["stages"]
    )
    _print_stages(f"{place}: {cell.stage_label}: {shown}; loss {row['loss']:.3f}, {row['wall_s']:.0f} s")
