"""The console of every command: figures on stdout, errors on stderr; rich is loaded at the first line.

A program that asked for JSON gets the same figures as an object, so they are not printed as well.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from phalanx.cli.answers.answer import for_programs
from phalanx.cli.files import write_text

if TYPE_CHECKING:
    from rich.console import RenderableType

_MAX_CHARACTERS = 100_000


def print_error(message: str) -> None:
    """Print one error on stderr; the text is never read as markup, and nothing in it can steer the terminal."""
    typer.secho("error: ", fg=typer.colors.RED, bold=True, err=True, nl=False)
    typer.echo(_printable_text(message), err=True)


def print_line(text: str) -> None:
    """Print a line that may quote a peer, a file or a model; nothing in it can steer the terminal."""
    typer.echo(_printable_text(text))


def print_figures(figures: Mapping[str, Any]) -> None:
    """Print names and values in two columns on stdout; a figure that was not measured is a dash."""
    if for_programs():
        return
    width = max((len(name) for name in figures), default=0)
    for name, value in figures.items():
        # a value of several lines must not look like further figures
        lines = _as_text(value).replace("\n", f"\n{'':<{width}}  ")
        typer.echo(f"{_printable_text(name):<{width}}  {lines}")


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print flat objects as one table on stdout, or as a list where the terminal is too narrow for it.

    Columns are in the order of their first appearance.
    """
    if for_programs() or not rows:
        return
    from phalanx.telemetry.fitted_table import FittedTable

    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_as_text(row.get(name)) for name in columns] for row in rows]
    print_page(FittedTable(columns, cells, left=columns))


def print_warnings(lines: Iterable[str]) -> None:
    """Print warnings where errors are printed: a program that reads the answer does not find them in it."""
    for text in lines:
        typer.echo(text, err=True)


def print_page(page: "RenderableType") -> None:
    """Print what lays itself out, such as a panel or a group of tables."""
    if for_programs():
        return
    from rich.console import Console

    Console().print(page)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object; as `write_text`."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def _as_text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | dict):
        return json.dumps(value)
    return _printable_text(str(value))


def _printable_text(text: str) -> str:
    """Figures and errors may quote a peer's text."""
    from phalanx.config import printable_text

    return printable_text(text, _MAX_CHARACTERS, keep="\n")
