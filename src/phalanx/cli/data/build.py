"""``phalanx data build``: a recipe to a dataset."""

import functools
import time
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_error, print_figures, print_page, print_rows, print_warnings
from phalanx.cli.data.copy import is_address, put_dataset
from phalanx.cli.options import Sets, Unsets, overrides_of

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


def print_side_by_side(preview: "Preview") -> None:
    """Print rows of kept and dropped texts; of each step that drops, at least one while there is room."""
    from rich.table import Table

    table = Table("kept", "left out", show_lines=True, expand=True)
    table.columns[0].ratio = table.columns[1].ratio = 1
    for document, dropped in zip_longest(_spread_rows(preview.kept, "source"), _spread_rows(preview.left_out, "step")):
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


_SAMPLE = 400


def build(
    recipe_file: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="Recipe of the dataset.")],
    *,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Output directory or address; default: datasets/RECIPE."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, help="Parallel processes; default: one for each core."),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option("--engine", help="Run processes of this machine, or tasks of a Ray cluster."),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option("--address", metavar="ADDRESS", help="With ray: address of a running cluster, such as auto."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what a sample keeps and drops; write nothing.")
    ] = False,
    documents: Annotated[
        int,
        typer.Option(
            "--documents", metavar="N", min=1, help="With --dry-run: number of documents to read of each source."
        ),
    ] = _SAMPLE,
    sets: Sets = None,
    unsets: Unsets = None,
) -> Answer:
    """Build a dataset from a recipe, or continue an interrupted build; the bytes are the same in both cases."""
    from phalanx.data.build.recipe import load_recipe
    from phalanx.data.row_layout import chats_read_as_text
    from phalanx.data.sources import links_out_of

    recipe = load_recipe(recipe_file, overrides_of(sets, unsets))
    print_warnings(chats_read_as_text(recipe.sources, "sources") + links_out_of(recipe.sources, "sources"))
    if dry_run:
        return preview_answer(recipe, documents, recipe_file.parent)
    from phalanx.cli.data.progress import BuildBar
    from phalanx.data.build.local import default_workers, open_local
    from phalanx.data.build.run import BuildOptions
    from phalanx.data.build.run import build_recipe as build_dataset
    from phalanx.report import write_data_report

    open_engine: Any = functools.partial(open_local, workers=workers or default_workers())
    if engine == "ray":
        from phalanx.launch.data_on_ray import RayTasks

        open_engine = functools.partial(RayTasks, workers=workers, address=address)
    store = out if out is not None and is_address(out) else None
    directory = Path("datasets") / recipe_file.stem if out is None or store else Path(out)
    begun = time.monotonic()
    try:
        with BuildBar() as bar:
            outcome = build_dataset(recipe, directory, BuildOptions(open_engine, recipe_file.parent, bar))
    except KeyboardInterrupt:
        print_error(f"{directory}: interrupted; repeat the same command to continue from the finished pieces")
        raise
    seconds = time.monotonic() - begun
    page = write_data_report(directory)
    figures = {
        "directory": directory,
        "digest": outcome.digest,
        "was there already": outcome.already_existed,
        **_build_totals(outcome.report, None if outcome.already_existed else seconds),
    }
    if outcome.report["not_found"]:
        figures["in [quarantine], of no document"] = ", ".join(outcome.report["not_found"])
    if store is not None:
        figures["copied to"] = put_dataset(directory, store)
    if not any(group["split"] == "validation" for group in outcome.report["groups"]):
        figures["held out"] = "none: raise output.validation_share, or set data.validation in the run file"
    print_figures({**figures, "report": page})
    return Answer({**{name.replace(" ", "_"): value for name, value in figures.items()}, "report": page})


def _build_totals(report: dict[str, Any], seconds: float | None) -> dict[str, Any]:
    sources = report["sources"]
    raw = sum(
        source["read"].get("raw_bytes", 0) + sum(part["raw_bytes"] for part in source["broken"].values())
        for source in sources
    )
    return {
        "documents": sum(group["documents"] for group in report["groups"]),
        "tokens": sum(group["tokens"] for group in report["groups"]),
        "raw bytes": raw,
        "kept bytes": sum(source["kept"].get("raw_bytes", 0) for source in sources),
        "MB per s": None if not seconds else raw / 1e6 / seconds,
    }
