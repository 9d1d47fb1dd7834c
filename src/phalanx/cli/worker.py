"""``phalanx worker``: host stages for an owner on another machine; ``phalanx masked-worker``: multiply for one."""

from pathlib import Path
from typing import Annotated

import typer


def worker(
    worker_file: Annotated[Path, typer.Argument(metavar="WORKER.toml", help="The worker file.")],
) -> None:
    """Join a run as a worker; it ends when the owner ends the run."""
    from phalanx.config import load_config
    from phalanx.pipeline import WorkerConfig, born_file, die_with_parent, run_worker

    die_with_parent()
    # an owner that starts workers again and again has them forked
    file = born_file(worker_file)
    if file is None:
        return
    config = load_config(file, WorkerConfig)
    if config.attack is None or config.attack.kind == "none":
        run_worker(config)
        return
    # an honest worker never loads the red team
    from phalanx.attacks import run_worker_with_attack

    run_worker_with_attack(config)


def masked_worker(
    worker_file: Annotated[Path, typer.Argument(metavar="WORKER.toml", help="The masked worker's file.")],
) -> None:
    """Multiply masked numbers for a trusted side; it ends when that side ends the run."""
    from phalanx.config import load_config
    from phalanx.split.masked import MaskedWorkerConfig, end_with_parent, run_masked_worker

    end_with_parent()
    run_masked_worker(load_config(worker_file, MaskedWorkerConfig))
