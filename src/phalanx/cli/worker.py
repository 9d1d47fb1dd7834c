"""``phalanx worker``: host middle stages for an owner on another machine."""

from pathlib import Path
from typing import Annotated

import typer


def worker(
    worker_file: Annotated[Path, typer.Argument(metavar="WORKER.toml", help="The worker file.")],
) -> None:
    """Join a run as a worker; it ends when the owner ends the run."""
    from phalanx.config import load_config
    from phalanx.pipeline import WorkerConfig, die_with_parent, run_worker

    config = load_config(worker_file, WorkerConfig)
    die_with_parent()
    if config.attack is None or config.attack.kind == "none":
        run_worker(config)
        return
    # an honest worker never loads the red team
    from phalanx.attacks import run_worker_with_attack

    run_worker_with_attack(config)
