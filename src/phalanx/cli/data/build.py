"""``phalanx data build``: a recipe to a dataset."""

import functools
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_error, print_figures, print_warnings
from phalanx.cli.data.copy import is_address, put_dataset
from phalanx.cli.options import Sets, Unsets, overrides_of

_SAMPLE = 400


def build(
    recipe_file: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The recipe.")],
    *,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="DIR", help="Output directory or address; default datasets/RECIPE."),
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
        int, typer.Option("--documents", metavar="N", min=1, help="With --dry-run: documents of each source.")
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
        from phalanx.cli.data.side_by_side import preview_answer

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
