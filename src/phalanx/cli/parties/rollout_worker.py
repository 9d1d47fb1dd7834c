"""``phalanx rollout-worker``: write texts for an owner that trains on them."""

import os
from pathlib import Path
from typing import Annotated

import typer

from phalanx.child import PARENT, die_with_parent
from phalanx.cli.answers.answer import Answer


def rollout_worker(
    worker_file: Annotated[
        Path, typer.Argument(metavar="WORKER.toml", help="Configuration file of the rollout worker.")
    ],
) -> Answer:
    """Generate texts with an owner's weights until the owner ends the run.

    Every token follows from the weights and public seeds, and the owner checks a random share: a worker that uses
    other weights, another temperature or other tokens is named, with evidence.
    """
    from phalanx.config import load_config
    from phalanx.rollouts import RolloutWorkerConfig

    if PARENT in os.environ:
        die_with_parent()
    # a mistake in the file is said before torch is imported
    config = load_config(worker_file, RolloutWorkerConfig)
    from phalanx.rollouts import run_rollout_worker

    run_rollout_worker(config)
    return Answer({"status": "complete"})
