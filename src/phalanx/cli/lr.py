"""``phalanx lr``: a short run with a rising learning rate, and the rate that follows."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_rows
from phalanx.cli.forking import one_blas_thread
from phalanx.cli.options import Sets, Unsets, overrides_of

_SHOWN = 20
"""Rows of the table at most; the picture and --json have every step."""


def lr(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Run file.")],
    sets: Sets = None,
    unsets: Unsets = None,
    to: Annotated[
        float | None, typer.Option("--to", metavar="RATE", help="Highest rate; default: ten times optimizer.lr.")
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=10, max=10_000, help="Steps to train, each at a higher rate.")
    ] = 100,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Output file of the chart.")] = Path("lr.svg"),
) -> Answer:
    """Suggest a learning rate: raise it while training some steps, and find the lowest loss.

    The steps are trained in a directory of their own, which is removed: no run directory is touched.
    """
    from phalanx.train import check_inputs, load_run

    # a mistake is said before torch is imported
    run = load_run(run_file, tuple(overrides_of(sets, unsets)))
    check_inputs(run)
    with one_blas_thread():
        from rich.console import Console

        from phalanx.report import write_rate_svg
        from phalanx.train import find_rate

    advice = find_rate(run, to, steps, Console(stderr=True))
    stride = -(-len(advice.readings) // _SHOWN) or 1
    print_rows(
        [
            {
                "step": str(reading.step + 1),
                "learning rate": f"{reading.lr:.3g}",
                "loss": "-" if reading.loss is None else f"{reading.loss:.4f}",
                "smoothed": "-" if reading.smoothed is None else f"{reading.smoothed:.4f}",
            }
            for reading in advice.readings[::stride]
        ]
    )
    typer.echo(advice.describe_advice())
    figures = advice.to_json()
    if advice.suggested is not None:
        rates = [(reading.lr, reading.loss, reading.smoothed) for reading in advice.readings]
        figures["picture"] = write_rate_svg(rates, advice.suggested, out)
        typer.echo(f"picture: {out}")
    return Answer(figures)
