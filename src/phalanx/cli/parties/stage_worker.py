"""``phalanx stage-worker``: hold a stage of a model that an owner serves."""

import os
from pathlib import Path
from typing import Annotated

import typer

from phalanx.child import PARENT, die_with_parent
from phalanx.cli.answers.answer import Answer


def stage_worker(
    worker_file: Annotated[Path, typer.Argument(metavar="WORKER.toml", help="Configuration file of the stage worker.")],
) -> Answer:
    """Run some layers of a model that an owner serves until the owner ends.

    The weights come from the owner. Every result is signed, and the owner redoes texts that it draws in secret: a
    worker that computes otherwise is named, with evidence.
    """
    from phalanx.config import load_config
    from phalanx.serve.stages import StageWorkerConfig

    if PARENT in os.environ:
        die_with_parent()
    # a mistake in the file is said before torch is imported
    config = load_config(worker_file, StageWorkerConfig)
    from phalanx.serve.stages import run_stage_worker

    run_stage_worker(config)
    return Answer({"status": "complete"})
