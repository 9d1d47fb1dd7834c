"""``phalanx worker``: host stages for an owner on another machine; ``phalanx masked-worker``: multiply for one."""

import contextlib
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.child import PARENT, die_with_parent, write_stacks_on_request
from phalanx.cli.answers.answer import Answer
from phalanx.cli.files import name_file_in_errors

if TYPE_CHECKING:
    from rich.console import Console

    from phalanx.pipeline import WorkerConfig, WorkerConsole, WorkerOutcome


def worker(
    worker_file: Annotated[Path, typer.Argument(metavar="WORKER.toml", help="Worker file.")],
) -> Answer:
    """Join a run as a worker, until the owner ends the run.

    A machine that was invited uses `phalanx join TOKEN` instead, which makes its keys and its worker file first.
    """
    from phalanx.pipeline.processes.fork_server import FORK_SERVER
    from phalanx.pipeline.worker.worker_file import read_worker

    if str(worker_file) != FORK_SERVER:
        # a mistake is said before torch is imported
        with name_file_in_errors(worker_file):
            read_worker(worker_file)
    from phalanx.pipeline import requested_file

    # a fault in a library's own code leaves its place in the log, and so does a worker that hangs
    write_stacks_on_request()
    die_with_parent()
    # an owner that starts workers again and again has them forked
    file = requested_file(worker_file)
    if file is None:
        return Answer({})
    return outcome_answer(serve_once(read_worker(file), file))


def outcome_answer(outcome: "WorkerOutcome | None") -> Answer:
    """Return how a worker's part came to a good end, for programs; of a rank that follows another, nothing is known."""
    return Answer({} if outcome is None else {"status": outcome.name.lower(), "detail": outcome.value})


def serve_once(config: "WorkerConfig", file: Path) -> "WorkerOutcome | None":
    """Serve an owner once, alone or with the ranks of this party, and tell people of it.

    Returns:
        How it ended; None of a rank that follows another.
    """
    from rich.console import Console

    from phalanx.pipeline import WorkerConsole, run_worker
    from phalanx.telemetry.parties import live_parties

    # a worker that another process has started has no reader but that process, which looks at its last line
    has_reader, console = PARENT not in os.environ, Console()
    worker_console = WorkerConsole(functools.partial(_print_above_table, console) if has_reader else None)
    if config.parallel.num_ranks > 1:
        return _serve_together(config, file, worker_console)
    with live_parties(console, worker_console.table_rows) if has_reader else contextlib.nullcontext():
        return run_worker(config, worker_console=worker_console)


def _print_above_table(console: "Console", line: str) -> None:
    """Print a line above the live table, which cannot see text that is written past its own console."""
    from phalanx.config import escape_controls

    # whoever has closed the terminal may still want the worker
    with contextlib.suppress(OSError):
        console.print(escape_controls(line), markup=False, highlight=False, soft_wrap=True)


def _serve_together(config: "WorkerConfig", file: Path, worker_console: "WorkerConsole") -> "WorkerOutcome | None":
    from phalanx.parallel import find_place
    from phalanx.pipeline import run_worker
    from phalanx.stage_group import open_group, run_group_rank

    place = find_place(os.environ)
    if place is not None and place.rendezvous is not None and not place.is_lead:
        run_group_rank(config, place)
        return None
    with open_group(config, file) as group:
        return run_worker(config, group.wrap_copy, worker_console=worker_console)


def masked_worker(
    worker_file: Annotated[
        Path, typer.Argument(metavar="WORKER.toml", help="Configuration file of the masked worker.")
    ],
) -> Answer:
    """Multiply masked numbers for a trusted party, until that party ends the run."""
    from phalanx.config import load_config
    from phalanx.split.masked import MaskedWorkerConfig, run_masked_worker

    if PARENT in os.environ:
        die_with_parent()
    run_masked_worker(load_config(worker_file, MaskedWorkerConfig))
    return Answer({"status": "complete"})
