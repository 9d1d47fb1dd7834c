"""``phalanx worker``: host middle stages for an owner on another machine."""

from pathlib import Path
from typing import Annotated

import typer


def worker(
    worker_file: Annotated[Path, typer.Argument(metavar="WORKER.toml", help="The worker file.")],
) -> None:
    """Join a run as a worker; it ends when the owner ends the run."""
    from phalanx.attacks import run_worker_with_attack

    run_worker_with_attack(worker_file)
