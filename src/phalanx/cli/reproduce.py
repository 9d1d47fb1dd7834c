"""``phalanx reproduce``: a table of the paper, trained here."""

import json
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.console import say_figures, say_rows, write_json
from phalanx.errors import ConfigError


def reproduce(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="vulnerability or defence.")],
    quick: Annotated[bool, typer.Option("--quick", help="Ends within 10 minutes on 2 cores.")] = False,
    small: Annotated[bool, typer.Option("--small", help="All cells, with less text, width and steps.")] = False,
    finished: Annotated[bool, typer.Option("--finished", help="Train nothing; show what is finished.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Also write the JSON.")] = None,
) -> None:
    """Train a table of Lu et al. 2023 and print it; call it again after an interruption, and it goes on."""
    from phalanx.reproduce import CELLS, as_tables
    from phalanx.reproduce import reproduce as train_table

    if table not in CELLS:
        raise ConfigError(f"reproduce: unknown table {table!r}; choices: {', '.join(sorted(CELLS))}")
    if quick and small:
        raise ConfigError("reproduce: --quick and --small are two sizes; choose one")
    size = "quick" if quick else "small" if small else "full"
    result = train_table(table, size=size, only_finished=finished)
    if out is not None:
        write_json(out, result)
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
        return
    typer.echo("perplexity on held-out text, best epoch / last epoch; below: least-most over the seeds")
    for title, lines in as_tables(result["summary"]).items():
        typer.echo(f"\n{title}")
        say_rows(lines)
    say_figures({key: result[key] for key in ("command", "commit", "load", "missing")})
