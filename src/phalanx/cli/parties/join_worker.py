"""phalanx join, for a worker of a pipeline: a look at this machine, keys, a worker file, and then to serve."""

import json
import signal
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import typer

from phalanx.cli.console import print_line
from phalanx.cli.files import write_text

if TYPE_CHECKING:
    from phalanx.pipeline import WorkerOutcome
    from phalanx.security.invite import JoinAnswer, JoinToken

_LOOKS_S = 60


MASKED_KEYS = 'owner_name = "enclave"\nrejoins = true\n'
"""Of the file of a masked worker, which an enclave awaits in one session after the other."""


def enrol_worker(
    token: "JoinToken", home: Path, advertise: str | None, port: int, *, is_masked: bool = False
) -> "JoinAnswer":
    """Examine this machine, be probed and certified, and print the owner's requirements.

    Args:
        is_masked: It works for the enclave of a split, whose run file comes with the certificate.
    """
    from phalanx.errors import ConfigError
    from phalanx.pipeline.processes.own_memory import measure_own_memory
    from phalanx.pipeline.processes.own_speed import own_gflops
    from phalanx.security.invite import JoinOffer, ReachabilityListener, enrol_machine

    free_mib = min((size // 2**20 for size in measure_own_memory("").values()), default=None)
    gflops = own_gflops()
    bind = "::" if token.address.startswith("[") else "0.0.0.0"  # noqa: S104 - the owner is to reach it
    with ReachabilityListener(bind, port, token.secret) as door:
        enrolment = enrol_machine(token, home, JoinOffer(door.port, advertise, free_mib, gflops))
    if enrolment.run and not is_masked:
        raise ConfigError(
            "--train and --test, or --masked: expected with this token, which is for a client of a split with its own "
            "texts, or for a masked worker"
        )
    typer.echo(f"certified as {token.name}; the keys are in {home} and stay there")
    typer.echo(f"the owner can reach this machine; the clocks differ by {abs(enrolment.skew_s)} s")
    free = "unknown" if free_mib is None else f"{free_mib:,} MiB"
    typer.echo(f"this machine: {free} free for stages, {gflops:,} GFLOP/s; reported to the owner")
    for asked in enrolment.asks:
        typer.echo(f"your task: {asked}")
    if free_mib is not None and enrolment.needs_mib > free_mib:
        typer.echo(
            f"too little memory: a stage takes up to {enrolment.needs_mib:,} MiB; you get stages that fit, or none"
        )
    return enrolment


def keep_terms(name: str, text: str, home: Path) -> str:
    """Write the run file of a split beside a masked worker's keys; return where the enclave awaits the worker."""
    from phalanx.errors import ConfigError
    from phalanx.train.config import SplitRun, load_run
    from phalanx.train.parties.invited import check_terms

    check_terms(name, text)
    path = home / "run.toml"
    write_text(path, text)
    run = load_run(path)
    if not isinstance(run, SplitRun) or run.split.masked.address is None or name not in run.split.masked_workers:
        raise ConfigError(f"{path}: has no masked worker {name}; join without --masked")
    return run.split.masked.address


def worker_file(home: Path, owner: str, host: str, port: int, more: str = "") -> str:
    """Return the text of a worker's file.

    Args:
        more: Lines of keys that stand before the section `transport`.
    """
    return (
        f"identity = {json.dumps(str(home.resolve()))}\n"
        f"owner = {json.dumps(owner)}\n"
        f"advertise = {json.dumps(bracket_host(host))}\n"
        f"{more}"
        f"join_timeout_s = {_LOOKS_S}.0\n\n"
        f'[transport]\nbind = "{"::" if ":" in host else "0.0.0.0"}"\nport = {port}\n'  # noqa: S104 - others reach it
    )


def bracket_host(host: str) -> str:
    """Return a host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def serve_worker(file: Path, *, stay: bool = False) -> "WorkerOutcome | None":
    """Serve until the run is complete; again whenever the owner is back; None where it was told to leave before.

    Args:
        stay: Serve run after run, until it is told to leave.
    """
    from phalanx.cli.worker import serve_once
    from phalanx.pipeline import WorkerOutcome, keep_serving
    from phalanx.pipeline.worker.worker_file import load_worker

    config = load_worker(file)
    if config.parallel.num_ranks > 1:
        return serve_once(config, file)
    # while it serves, the worker itself takes the first signal as the wish to hand over
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        while True:
            outcome = keep_serving(lambda: serve_once(config, file), print_line, time.sleep)
            if not stay or outcome is not WorkerOutcome.COMPLETE:
                break
            print_line("waiting for the next run of this owner; Ctrl-C stops")
    except KeyboardInterrupt:
        typer.echo("stopped while no run was under way")
        return None
    return outcome


def serve_masked(file: Path) -> None:
    """Multiply masked numbers until the enclave ends the run."""
    from phalanx.config import load_config
    from phalanx.split.masked import MaskedWorkerConfig, run_masked_worker

    run_masked_worker(load_config(file, MaskedWorkerConfig))


def serve_stage(file: Path) -> None:
    """Hold a stage of a served model until its owner ends."""
    from phalanx.config import load_config
    from phalanx.serve.stages import StageWorkerConfig, run_stage_worker

    run_stage_worker(load_config(file, StageWorkerConfig))


def serve_writer(file: Path, *, stay: bool = False) -> bool:
    """Write texts until the run is complete; again whenever the owner is back; False where it was told to leave before.

    Args:
        stay: Serve run after run, until it is told to leave.
    """
    from phalanx.config import load_config
    from phalanx.pipeline import keep_serving
    from phalanx.rollouts import RolloutWorkerConfig, run_rollout_worker

    config = load_config(file, RolloutWorkerConfig)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        while True:
            keep_serving(lambda: run_rollout_worker(config, report=print_line), print_line, time.sleep)
            if not stay:
                return True
            print_line("waiting for the next run of this owner; Ctrl-C stops")
    except KeyboardInterrupt:
        typer.echo("stopped; the owner has others write what is missing")
        return False


def _raise_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
