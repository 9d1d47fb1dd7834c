"""``phalanx reproduce``: a table of the paper, trained here; and what leaks at each cut of a split, measured here."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.console import say_figures, say_rows, write_json
from phalanx.errors import ConfigError

LEAKS = "leaks"


def reproduce(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="vulnerability, defence or leaks.")],
    quick: Annotated[bool, typer.Option("--quick", help="Ends within 10 minutes on 2 cores.")] = False,
    small: Annotated[bool, typer.Option("--small", help="All cells, with less text, width and steps.")] = False,
    finished: Annotated[bool, typer.Option("--finished", help="Train nothing; show what is finished.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON.")] = None,
) -> None:
    """Train a table of Lu et al. 2023, or measure leaks; call it again after an interruption, and it goes on."""
    if quick and small:
        raise ConfigError("reproduce: --quick and --small are two sizes; choose one")
    size = "quick" if quick else "small" if small else "full"
    title, tables, result = (_leaks if table == LEAKS else _trained)(table, size, finished)
    if out is not None:
        write_json(out, result)
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
        return
    typer.echo(title)
    for name, lines in tables.items():
        typer.echo(f"\n{name}")
        say_rows(lines)
    say_figures({key: result[key] for key in ("command", "commit", "load", "missing")})


_Answer = tuple[str, dict[str, list[dict[str, str]]], dict[str, Any]]


def _trained(table: str, size: str, finished: bool) -> _Answer:
    from phalanx.reproduce import CELLS, as_tables
    from phalanx.reproduce import reproduce as train_table

    if table not in CELLS:
        choices = ", ".join(sorted([*CELLS, LEAKS]))
        raise ConfigError(f"reproduce: unknown table {table!r}; choices: {choices}")
    result = train_table(table, size=size, only_finished=finished)
    title = "perplexity on held-out text, best epoch / last epoch; below: least-most over the seeds"
    return title, as_tables(result["summary"]), result


def _leaks(table: str, size: str, finished: bool) -> _Answer:
    from phalanx.reproduce.leaks import as_lines, measure_leaks

    result = measure_leaks(size=size, only_finished=finished)
    title = "tokens that the best attack recovers from what crosses a cut; each attack's share is in plaintext"
    return title, {str(result["model"]["name"]): as_lines(result["summary"])}, result
