"""``phalanx data diff``: two datasets compared."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import say_figures, say_rows
from phalanx.cli.data.options import DatasetDir, KeyFile, opened


def diff(
    first: DatasetDir,
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="The directory of another dataset.")],
    *,
    documents: Annotated[
        int, typer.Option("--documents", metavar="N", min=0, help="Maximum number of differing documents to list.")
    ] = 10,
    key: KeyFile = None,
) -> Answer:
    """Compare two datasets: sources, steps, thresholds, counts, and documents by digest."""
    from phalanx.data.build.look import compare, named_changes

    datasets = opened(first, key), opened(second, key)
    differences = compare(*datasets)
    named = list(named_changes(*datasets, documents))
    say_rows(differences["changed"])
    say_figures({f"documents {name}": value for name, value in differences["documents"].items()})
    say_rows(named)
    return Answer({**differences, "named": named})
