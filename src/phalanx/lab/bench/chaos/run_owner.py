"""A process that trains a run as ``phalanx train`` does, with workers that are killed as planned."""

import functools
import sys
from pathlib import Path

from rich.console import Console

from phalanx.child import die_with_parent
from phalanx.config import StrictModel
from phalanx.errors import PhalanxError
from phalanx.interrupts import allow_interrupts
from phalanx.pipeline import LocalWorkers
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
    """Train to the end.

    Returns:
        The exit code that ``phalanx train`` would have.
    """
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
