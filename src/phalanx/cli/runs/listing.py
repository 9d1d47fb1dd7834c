"""``phalanx runs`` and ``phalanx compare``: the runs of a directory, and several of them side by side."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_rows

RUNS_EPILOG = (
    "Example: phalanx runs --state completed --engine pipeline --max-loss 3.5\n\n"
    "Example: phalanx runs runs/search --since 2026-11-01 --json"
)
COMPARE_EPILOG = "Example: phalanx compare runs/first runs/second --out first-second.html"


def runs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of run directories.")] = Path("runs"),
    *,
    state: Annotated[
        str, typer.Option("--state", metavar="S", help="completed, interrupted, failed or unfinished.")
    ] = "",
    engine: Annotated[str, typer.Option("--engine", metavar="E", help="pipeline, parallel, split or federated.")] = "",
    model: Annotated[str, typer.Option("--model", metavar="TEXT", help="Part of the model's name.")] = "",
    max_loss: Annotated[
        float | None, typer.Option("--max-loss", metavar="NATS", help="Highest loss, of validation where there is one.")
    ] = None,
    since: Annotated[str, typer.Option("--since", metavar="DATE", help="Begun on this day (UTC) or later.")] = "",
    until: Annotated[str, typer.Option("--until", metavar="DATE", help="Begun on this day or earlier.")] = "",
) -> Answer:
    """List the runs in a directory, the latest first; options leave some of them out."""
    from phalanx.errors import InputError
    from phalanx.report.run_list import ENGINES, STATES, RunFilter, list_runs, parse_day

    for option, value, choices in (("--state", state, STATES), ("--engine", engine, ENGINES)):
        if value and value not in choices:
            raise InputError(f"{option} {value}: expected one of {', '.join(choices)}").with_facts(
                key=option, found=value, expected=", ".join(choices)
            )
    days = [parse_day(text) if text else None for text in (since, until)]
    rows = list_runs(directory, RunFilter(state, engine, model, max_loss, *days))
    print_rows([row.to_json() for row in rows])
    if not rows:
        typer.echo(f"{directory}: no such run")
    return Answer({"runs": [row.to_json() for row in rows]})


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR", help="Two to six run directories.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Output file of the page.")] = Path("compare.html"),
) -> Answer:
    """Compare runs: settings that differ, curves, figures, and which differences exceed noise."""
    from phalanx.report.compare import compare_runs, write_comparison

    comparison = compare_runs(run_dirs)
    names = comparison.names
    for title, rows in (("setting", comparison.settings), ("figure", comparison.figures)):
        print_rows([{title: key, **dict(zip(names, values, strict=True))} for key, values in rows.items()])
    print_rows(
        [
            {"difference": row.figure, "run": row.run, "by": row.difference, "noise": row.noise, "verdict": row.verdict}
            for row in comparison.differences
        ]
    )
    page = write_comparison(comparison, out)
    typer.echo(f"page: {page}")
    return Answer({**comparison.to_json(), "page": page})
