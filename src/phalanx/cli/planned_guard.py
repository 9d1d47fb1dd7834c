"""The part of ``phalanx plan`` about the guard of a run file."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

from phalanx.cli.console import print_rows
from phalanx.planner.guard.finding import DetectionOdds, GuardPrice


@dataclass(frozen=True)
class PlannedGuard:
    """The finds and costs of a run's guard, as rows for the terminal and as JSON."""

    rows: list[dict[str, str]]
    note: str
    found: list[DetectionOdds]
    cost: GuardPrice

    def as_json(self) -> dict[str, Any]:
        """Findings and price."""
        findings = [asdict(finding) for finding in self.found]
        return {"guard_outlook": {"findings": findings, "price": asdict(self.cost)}}


def guard_of(run_file: Path, overrides: list[str]) -> PlannedGuard | None:
    """Predict the findings of a run file's guard; None where nothing is recomputed.

    The stages are taken for equal; ``phalanx train --dry-run`` knows their layers.
    """
    from phalanx.train import StagedRun, load_run
    from phalanx.train.setup.guard_outlook import outlook_rows, predict_guard, price_note

    run = load_run(run_file, overrides)
    if not isinstance(run, StagedRun):
        return None
    stages = run.pipeline.stages
    guard_outlook = predict_guard(run, max(stages - 2, 0) / stages)
    if guard_outlook is None:
        return None
    return PlannedGuard(outlook_rows(guard_outlook[0]), price_note(run.guard, guard_outlook[1]), *guard_outlook)


def print_guard(guarded: PlannedGuard | None) -> None:
    """Print the findings and the cost of a run's guard, if it has one."""
    if guarded is not None:
        print_rows(list(guarded.rows))
        typer.echo(guarded.note)
