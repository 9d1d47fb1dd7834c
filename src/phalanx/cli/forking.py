"""The fork server of a run's local workers: this very process, as it is when everything is imported (ADR 74)."""

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.answers.ending import exit_code_of
from phalanx.cli.worker import worker

if TYPE_CHECKING:
    from phalanx.pipeline.processes.fork_server_client import ForkServer
    from phalanx.train import RunConfig
    from phalanx.train.sessions.cluster import OpenWorkers

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_WORTH_IMPORTING = ("phalanx.pipeline.worker.process", "transformers.modeling_utils")
"""What every worker needs and no owner has imported before it builds its own stage."""


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it numpy is loaded without its thread for each core: a process that has threads is not to be forked."""
    if _BLAS_THREADS in os.environ:
        yield
        return
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        # processes that multiply with numpy inherit what there was
        del os.environ[_BLAS_THREADS]


def worker_opener(run: "RunConfig") -> "OpenWorkers":
    """Return what starts a run's local workers; call it before keys are read and text is prepared."""
    from phalanx.pipeline import LocalWorkers
    from phalanx.train import StagedRun

    fork_server = _fork_workers(run)
    if isinstance(run, StagedRun) and run.attack.kind != "none":
        from phalanx.lab.attacks import attackers_of

        return attackers_of(run.attack, fork_server, home=run.home)
    return functools.partial(LocalWorkers, fork_server=fork_server)


def _fork_workers(run: "RunConfig") -> "ForkServer | None":
    """Make this process a fork server of the run's workers.

    Returns:
        None where the run has no workers on this machine, where they compute on a device with a driver that does not
        survive a fork, and where this process has threads or the system cannot fork.
    """
    from phalanx.pipeline import can_fork, fork_here
    from phalanx.pipeline.processes.local_workers import WORKER_COMMAND
    from phalanx.train import PipelineRun

    is_pipeline_here = isinstance(run, PipelineRun) and not run.remote_workers
    if not (is_pipeline_here and run.stage_workers and run.train.device == "cpu" and can_fork()):
        return None
    with one_blas_thread():
        for name in _WORTH_IMPORTING:
            importlib.import_module(name)

    def serve(file: Path) -> int:
        return exit_code_of(lambda: worker(file))

    return fork_here(WORKER_COMMAND, run.train.threads, serve)
