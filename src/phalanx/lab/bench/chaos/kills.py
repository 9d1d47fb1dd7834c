"""Runs in which workers are killed at chosen points, compared with the same run undisturbed."""

import functools
import itertools
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from phalanx.child import die_with_parent
from phalanx.config import StrictModel
from phalanx.errors import PhalanxError
from phalanx.interrupts import allow_interrupts
from phalanx.lab.bench.chaos.kill_plan import KillPlan
from phalanx.lab.bench.chaos.run_process import RunProcess, train_command
from phalanx.lab.bench.measure.row_file import Row
from phalanx.pipeline import LocalWorkers
from phalanx.telemetry import read_metrics
from phalanx.train import PipelineRun
from phalanx.train.records.run_directory import RunDirectory
from phalanx.train.sessions.cluster import OpenWorkers
from phalanx.train.sessions.pipeline import PipelineFactory
from phalanx.train.sessions.session import Session
from phalanx.train.setup.process import deterministic_kernels

DEATHS = "deaths.jsonl"
"""File in the run directory with the records that workers wrote when they were killed."""


class OwnerSpec(StrictModel):
    """A run with its plan of kills.

    Attributes:
        directory: Its run directory, a new one.
        plan: File of a `KillPlan`.
    """

    run: PipelineRun
    directory: str
    plan: str


def main(spec_file: Path) -> int:
    """Train to the end."""
    die_with_parent()
    spec = OwnerSpec.model_validate_json(spec_file.read_text(encoding="utf-8"))
    console = Console(stderr=True)
    try:
        with deterministic_kernels(spec.run.train.threads), allow_interrupts():
            home = RunDirectory(Path(spec.directory), spec.run, resume=False)
            session = Session(spec.run, home, console, PipelineFactory(_dying_workers(spec)))
            return 0 if session.run_session(resume=False)["status"] == "completed" else 1
    except PhalanxError as exc:
        console.print(f"{type(exc).__name__}: {exc}")
        return exc.exit_code


def _dying_workers(spec: OwnerSpec) -> OpenWorkers:
    deaths = str(Path(spec.directory).resolve() / DEATHS)
    return functools.partial(LocalWorkers, command=("phalanx.lab.bench.chaos.dying_worker", spec.plan, deaths))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))


_TIMEOUT_S = 3600.0
Line = dict[str, Any]


def run_undisturbed(run: PipelineRun, directory: Path, cache: Path) -> Row:
    """Train without a death.

    Returns:
        `final_weights_digest`, the digest of each step's batch, and the median seconds from one step's end to the next.
    """
    run_dir = directory / "run"
    summary, lines = _train_with_kills(train_command(run, run_dir), run_dir, cache)
    return {
        "final_weights_digest": summary["final_weights_digest"],
        "batches": [row["batch"] for row in lines],
        "steps": len(lines),
        "step_s": median_or_none([later["time"] - row["time"] for row, later in itertools.pairwise(lines)]),
    }


def run_kills(run: PipelineRun, plan: KillPlan, clean: Row, directory: Path, cache: Path) -> Row:
    """Train while workers die as planned, and compare with the undisturbed run."""
    directory.mkdir(parents=True, exist_ok=True)
    plan_file = directory / "plan.json"
    plan_file.write_text(plan.model_dump_json(), encoding="utf-8")
    run_dir, spec_file = directory / "run", directory / "owner.json"
    spec = OwnerSpec(run=run, directory=str(run_dir), plan=str(plan_file.resolve()))
    spec_file.write_text(spec.model_dump_json(), encoding="utf-8")
    summary, lines = _train_with_kills(["phalanx.lab.bench.chaos.kills", str(spec_file)], run_dir, cache)
    events = read_lines(run_dir / "events.jsonl")
    deaths = read_lines(run_dir / DEATHS)
    lost, doubled = samples_off(clean["batches"], [row["batch"] for row in lines], run.train.batch_size)
    return {
        "planned": len(plan.kills),
        "count": len(deaths),
        "bit_identical": summary["final_weights_digest"] == clean["final_weights_digest"],
        "samples_lost": lost,
        "samples_doubled": doubled,
        "steps_lost": summary["steps_lost"],
        "steps_redone": summary["steps_redone"],
        "false_accusations": len(summary["verdicts"]),
        "lost": len(summary["lost"]),
        "replaced": sum(event["kind"] == "respawned" for event in events),
        "joined": sum(event["kind"] == "party_joined" and "step" in event["body"] for event in events),
        "asynchronous_checkpoints": run.checkpoint.asynchronous,
        "steps": len(lines),
        "kills": kill_rows(deaths, events, lines),
    }


def kill_rows(deaths: Iterable[Line], events: Sequence[Line], lines: Sequence[Line]) -> list[Row]:
    """Compute, for each kill, how long it was unnoticed and how long it took until the disturbed step was done.

    Args:
        deaths: Records that the killed workers wrote.

    Returns:
        A row a kill. The disturbed step is the first one that ends after the kill was noticed; a figure is None where
        the run ended before that.
    """
    return [_kill_row(death, events, lines) for death in deaths]


def samples_off(expected: Sequence[str], found: Sequence[str], batch_size: int) -> tuple[int, int]:
    """Count sequences that were trained on less often, and more often, than in the undisturbed run.

    Args:
        expected: Digest of each step's batch, undisturbed.
        found: The same of the run in question, as it was applied in the end.
    """
    missing, got = Counter(expected), Counter(found)
    return (missing - got).total() * batch_size, (got - missing).total() * batch_size


def kills_block(rows: Sequence[Row]) -> dict[str, Any]:
    """The block `kills`: all runs together; None for what no run has measured."""
    kills = [kill for row in rows for kill in row["kills"]]
    recoveries = sorted(kill["recovery_s"] for kill in kills if kill["recovery_s"] is not None)
    after = sorted(kill["after_detection_s"] for kill in kills if kill["after_detection_s"] is not None)
    noticed = sorted(kill["noticed_s"] for kill in kills if kill["noticed_s"] is not None)

    def total(name: str) -> int | None:
        return sum(row[name] for row in rows) if rows else None

    return {
        "count": len(kills),
        "planned": total("planned"),
        "runs": len(rows),
        "bit_identical": all(row["bit_identical"] for row in rows) if rows else None,
        "runs_bit_identical": total("bit_identical"),
        "samples_lost": total("samples_lost"),
        "samples_doubled": total("samples_doubled"),
        "false_accusations": total("false_accusations"),
        "steps_lost": total("steps_lost"),
        "by_point": dict(sorted(Counter(kill["point"] for kill in kills).items())),
        "recovery_s_median": median_or_none(recoveries),
        "recovery_s_worst": max(recoveries, default=None),
        "detection_s_median": median_or_none(noticed),
        "detection_s_worst": max(noticed, default=None),
        "after_detection_s_median": median_or_none(after),
        "after_detection_s_worst": max(after, default=None),
        "not_timed": len(kills) - len(recoveries),
    }


def median_or_none(values: Sequence[float]) -> float | None:
    """The median; None of nothing."""
    return statistics.median(values) if values else None


def read_lines(path: Path) -> list[Line]:
    """Objects of a file with one JSON object a line; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]


def _kill_row(death: Line, events: Sequence[Line], lines: Sequence[Line]) -> Row:
    noticed = next(
        (
            datetime.fromisoformat(event["time"]).timestamp()
            for event in events
            if event["kind"] == "link_broken" and event["body"]["party"] == death["worker"]
        ),
        None,
    )
    done = None if noticed is None else next((row for row in lines if row["time"] >= noticed), None)
    return {
        "worker": death["worker"],
        "point": death["point"],
        "step": death["step"],
        "microbatch": death["microbatch"],
        "step_done": None if done is None else done["step"],
        "attempts": None if done is None else done["attempts"],
        "noticed_s": None if noticed is None else noticed - death["time"],
        "after_detection_s": None if done is None or noticed is None else done["time"] - noticed,
        "recovery_s": None if done is None else done["time"] - death["time"],
    }


def _train_with_kills(command: Sequence[str], run_dir: Path, cache: Path) -> tuple[dict[str, Any], list[Line]]:
    with RunProcess(command, run_dir, cache) as owner:
        owner.await_success(_TIMEOUT_S)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    return summary, read_metrics(run_dir / "metrics.jsonl")
