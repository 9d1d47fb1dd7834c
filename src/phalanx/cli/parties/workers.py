"""Commands that start a process which computes for an owner: a client, a rollout worker, a stage worker."""

import os
from pathlib import Path
from typing import Annotated

import typer

from phalanx.child import PARENT, die_with_parent
from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line


def client(
    client_file: Annotated[Path, typer.Argument(metavar="CLIENT.toml", help="Client file: keys, texts and policy.")],
) -> Answer:
    """Join a split as a client: appraise the enclave, and send it sealed training data.

    Texts and keys stay here; the owner of the run gets sums over all clients. After a broken session the client waits;
    it ends when the owner ends the run.
    """
    from phalanx.train.parties.client_file import read_client

    # a mistake is said before torch is imported
    config, run, name = read_client(client_file)
    from phalanx.train.parties.client_process import run_client

    run_client(config, run, name, print_line)
    return Answer({"status": "complete", "party": name})


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

    run_rollout_worker(config, report=print_line)
    return Answer({"status": "complete"})


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
