"""Kept and dropped texts beside each other, with the rule and the value that decided."""

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_page, print_rows

if TYPE_CHECKING:
    from rich.console import RenderableType

    from phalanx.data.build.preview import Preview
    from phalanx.data.build.recipe import DataRecipe

_ROWS = 12
_CHARACTERS = 220


def preview_answer(recipe: "DataRecipe", documents: int, home: Path) -> Answer:
    """Take a sample of each source through a recipe, print what becomes of it, and return it."""
    from phalanx.data.build.preview import preview_build

    sample = preview_build(recipe, documents, home)
    print_side_by_side(sample)
    print_rows([{"what": name, "documents": count} for name, count in sample.counts.items()])
    facts = {"counts": sample.counts, "edited": sample.edited, "kept": sample.kept, "left_out": sample.left_out}
    return Answer({"dry_run": True, **facts})


def print_side_by_side(found: "Preview") -> None:
    """Print rows of kept and dropped texts; of each step that drops, at least one while there is room."""
    from rich.table import Table

    table = Table("kept", "left out", show_lines=True, expand=True)
    table.columns[0].ratio = table.columns[1].ratio = 1
    for document, dropped in zip_longest(_spread_rows(found.kept, "source"), _spread_rows(found.left_out, "step")):
        table.add_row(_kept_cell(document), _left_out(dropped))
    print_page(table)


def _spread_rows(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return a few rows; different sources or steps come first."""
    by_key: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_key.setdefault(row[key], []).append(row)
    turns = [row for together in zip_longest(*by_key.values()) for row in together if row is not None]
    return turns[:_ROWS]


def _kept_cell(row: dict[str, Any] | None) -> "RenderableType":
    return "" if row is None else _text_cell(f"{row['source']}: {row['document']}", "green", row["text"])


def _left_out(row: dict[str, Any] | None) -> "RenderableType":
    if row is None:
        return ""
    limit = f", limit {row['limit']}" if row["limit"] != "" else ""
    value = f" {row['value']}" if row["value"] != "" else ""
    title = f"{row['fate']} by {row['step']}: {row['measure']}{value}{limit}\n{row['source']}: {row['document']}"
    return _text_cell(title, "yellow", row.get("excerpt", ""))


def _text_cell(title: str, colour: str, text: str) -> "RenderableType":
    from rich.text import Text

    from phalanx.config import printable_text

    cell = Text(printable_text(title, keep="\n"), style=colour)
    return cell.append("\n" + printable_text(text, _CHARACTERS, keep="\n"), style="default")
