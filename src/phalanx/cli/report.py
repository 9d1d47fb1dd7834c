"""``phalanx report``: the pictures of a run, from its run directory."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run directory, finished or not.")],
) -> None:
    """Write report.html into a run directory and print its path."""
    from phalanx.report import write_report

    typer.echo(write_report(run_dir))
