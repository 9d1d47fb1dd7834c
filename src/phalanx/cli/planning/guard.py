"""The part of ``phalanx plan`` about the guard of a run file."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from phalanx.cli.console import print_rows
from phalanx.planner.guard.finding import DetectionOdds, GuardPrice
from phalanx.planner.guard.price_law import StepSize
from phalanx.planner.model.shape import ModelShape


@dataclass(frozen=True)
class PlannedGuard:
    """The finds and costs of a run's guard, as rows for the terminal and as JSON."""

    rows: list[dict[str, str]]
    presets: list[dict[str, str]]
    note: str
    found: list[DetectionOdds]
    cost: GuardPrice

    def as_json(self) -> dict[str, Any]:
        """Findings and price."""
        findings = [asdict(finding) for finding in self.found]
        return {"guard_outlook": {"findings": findings, "price": asdict(self.cost), "presets": self.presets}}


def guard_of(run_file: Path, overrides: list[str], shape: ModelShape) -> PlannedGuard | None:
    """Predict the findings of a run file's guard; None where nothing is recomputed.

    The stages are taken for equal; ``phalanx train --dry-run`` knows their layers.
    """
    from phalanx.train import StagedRun, load_run
    from phalanx.train.setup.guard_outlook import outlook_rows, predict_guard, preset_rows, price_note

    run = load_run(run_file, overrides)
    if not isinstance(run, StagedRun):
        return None
    tokens, microbatches = run.train.batch_size * run.data.sequence_length, run.train.microbatches
    size = StepSize.of_equal_stages(
        shape.num_parameters, shape.hidden, tokens, stages=run.pipeline.stages, microbatches=microbatches
    )
    expected = None if size is None else predict_guard(run, size)
    if size is None or expected is None:
        return None
    note, presets = price_note(run.guard, expected[1]), preset_rows(run, size)
    return PlannedGuard(outlook_rows(expected[0]), presets, note, *expected)


def print_guard(guarded: PlannedGuard | None) -> None:
    """Print the findings and the cost of a run's guard, if it has one."""
    if guarded is not None:
        print_rows(list(guarded.rows))
        print_rows(list(guarded.presets))
        typer.echo(guarded.note)
