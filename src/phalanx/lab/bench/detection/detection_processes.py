"""``phalanx bench detection-processes``: a drawn sample of `bench detection`, each company in processes of its own."""

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from phalanx.config import digest_config
from phalanx.data import BpeConfig, DataConfig, PythonManualConfig
from phalanx.errors import PhalanxError
from phalanx.lab.bench.detection.cell import DetectionCell
from phalanx.lab.bench.detection.cells import PRESET_STEPS, detection_cells
from phalanx.lab.bench.detection.detection import PROTOCOL
from phalanx.lab.bench.detection.drill_plan import DrillRun
from phalanx.lab.bench.detection.drills import Train, drill_row, train_quietly
from phalanx.lab.bench.detection.simulated_run import lying_early
from phalanx.lab.bench.measure.harness import cache_directory, print_progress, scratch_directory
from phalanx.lab.bench.measure.machine import bench_head, code_version, load_average
from phalanx.lab.bench.measure.row_file import Row, RowFile, sweep_cells
from phalanx.pipeline import AttackConfig, GuardConfig
from phalanx.train import PipelineRun

SEED = 14
"""Seed of the draw, so that a sample can be had again."""
_SIZE = {"quick": 3, "full": 24}
_MAX_STEPS = 96
_VOCABULARY = 300


def bench_detection_processes(quick: bool, only_finished: bool = False) -> dict[str, Any]:
    """Train each drawn company in real processes; progress goes to standard error.

    Returns:
        A row for each company, and how many are `missing`; `held` counts companies that ended without an error, without
        an honest party blamed and with the bits of the undisturbed run.
    """
    started, load = time.monotonic(), load_average()
    code, drawn = code_version(), draw_cells(_SIZE["quick" if quick else "full"])
    finished: RowFile[DetectionCell] = RowFile(
        cache_directory() / "bench" / "detection-processes.jsonl",
        lambda cell: [PROTOCOL, code, digest_config(process_run_of(cell))],
    )
    with scratch_directory() as directory:
        company = ProcessCompanies(directory, train_quietly)
        rows = list(sweep_cells(drawn, finished, None if only_finished else company.train_cell, _print_company))
    return {
        **bench_head("detection-processes", load, quick=quick, commit=code),
        "wall_s": time.monotonic() - started,
        "seed": SEED,
        "missing": len(drawn) - len(rows),
        "held": sum(row["held"] for row in rows),
        "rows": rows,
    }


def draw_cells(size: int) -> list[DetectionCell]:
    """Cells of `bench detection` with a preset and an attacker, drawn without putting back, as many of each preset."""
    draw = random.Random(SEED)  # noqa: S311 - a sample, no secret
    attacked = [cell for cell in detection_cells(quick=False) if cell.run.attack.kind != "none"]
    drawn_cells: list[DetectionCell] = []
    for preset in sorted(PRESET_STEPS):
        choice = [cell for cell in attacked if cell.guard == preset]
        drawn_cells += draw.sample(choice, size // len(PRESET_STEPS))
    return drawn_cells


def process_run_of(cell: DetectionCell) -> PipelineRun:
    """The run of a cell on real text, with as many steps as it may take, but at most 96."""
    run, steps = cell.run, min(cell.steps, _MAX_STEPS)
    architecture = {**(run.model.architecture or {}), "vocab_size": _VOCABULARY}
    return run.model_copy(
        update={
            "model": run.model.model_copy(update={"architecture": architecture}),
            "data": DataConfig(
                sources=(PythonManualConfig(),),
                tokenizer=BpeConfig(vocab_size=_VOCABULARY),
                sequence_length=run.data.sequence_length,
                validation_share=0.2,
                max_documents=12,
                max_validation_sequences=8,
            ),
            "train": run.train.model_copy(update={"steps": steps, "validate_every": 0}),
            "checkpoint": run.checkpoint.model_copy(update={"every": 0}),
            "attack": lying_early(run.attack),
        }
    )


class ProcessCompanies:
    """A runner of companies in processes; it trains the undisturbed run once for each layout and number of steps."""

    def __init__(self, directory: Path, trainer: Train) -> None:
        self._directory = directory
        self._trainer = trainer
        self._clean: dict[str, dict[str, Any]] = {}

    def train_cell(self, cell: DetectionCell) -> Row:
        """Train a company and compare it with the undisturbed run."""
        run, started = process_run_of(cell), time.perf_counter()
        undisturbed = run.model_copy(update={"guard": GuardConfig(mode="off"), "attack": AttackConfig()})
        name = digest_config(undisturbed)
        if name not in self._clean:
            self._clean[name] = self._trainer(undisturbed, self._directory / name)
        directory = Path(tempfile.mkdtemp(dir=self._directory)) / "run"
        try:
            summary = self._trainer(run, directory)
        except PhalanxError as exc:
            summary = {"error": f"{type(exc).__name__}: {exc}"}
        liars = {f"worker-{stage}": run.attack for stage in run.attack.stages}
        row = {"attack": run.attack.kind, **drill_row(DrillRun(run, liars), summary, self._clean[name])}
        return {
            "preset": cell.guard,
            "K": run.pipeline.stages,
            "stages": list(run.attack.stages),
            "rate": run.attack.rate,
            "direction": run.attack.direction,
            "steps": run.train.steps,
            **row,
            "in_doubt": summary.get("in_doubt"),
            "steps_redone": summary.get("steps_redone"),
            "held": row["error"] is None and row["false_accusations"] == 0 and row["bit_identical"] is True,
            "wall_s": time.perf_counter() - started,
        }


def _print_company(which: str, cell: DetectionCell, row: Row) -> None:
    print_progress(
        f"{which}: {row['attack']} K={row['K']} {row['preset']}: blamed {row['blamed']} lost {row['lost']}, "
        f"bits of the undisturbed run: {row['bit_identical']}"
    )
