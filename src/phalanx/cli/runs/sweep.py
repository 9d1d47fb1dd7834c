"""``phalanx sweep``: a search over the values of a run file."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_line, print_rows
from phalanx.cli.forking import one_blas_thread
from phalanx.cli.options import Sets, Unsets, overrides_of

if TYPE_CHECKING:
    from rich.console import Console

SWEEP_EPILOG = (
    "Example: phalanx sweep sweep.toml\n\n"
    "Example: phalanx sweep sweep.toml --set trials=40 --set jobs=4 --resume\n\n"
    'Example of a sweep file: run = "run.toml", then a section space with "optimizer.lr" = { low = 1e-4, high = 1e-1, '
    "log = true }"
)


def sweep(
    sweep_file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="Sweep file.")],
    *,
    sets: Sets = None,
    unsets: Unsets = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="Directory of the search; default: runs/NAME.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a search that was stopped.")] = False,
) -> Answer:
    """Search for values of a run file; the best trials are trained again before one of them wins.

    Each trial is an ordinary run directory below the directory of the search. A value is the loss that this process
    finds in the trial's verified checkpoint, whatever the trial reports.
    """
    from phalanx.sweep import load_sweep

    # a mistake is said before torch is imported
    search = load_sweep(sweep_file, tuple(overrides_of(sets, unsets)))
    with one_blas_thread():
        from phalanx.sweep import ProcessTrials, RunTrials, Sweep
    home = directory or Path("runs") / sweep_file.stem
    trials = RunTrials(_open_log) if search.jobs == 1 else ProcessTrials(_open_log, search.max_memory_mib)
    result = Sweep(search, home, trials, print_line).run_search(resume=resume)
    print_rows(
        [
            {"trial": trial.number, "state": trial.state, "loss": trial.loss, "steps": trial.steps, **trial.values}
            for trial in result.trials
        ]
    )
    print_line(result.describe_winner())
    return Answer({"directory": home, **result.to_json()})


@contextlib.contextmanager
def _open_log(run_dir: Path) -> Iterator["Console"]:
    """Open the text file beside a trial's directory for the lines of its run."""
    from rich.console import Console

    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with run_dir.with_suffix(".log").open("a", encoding="utf-8") as file:
        yield Console(file=file, width=160)
