"""``phalanx data diff``: two datasets compared."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures, print_rows
from phalanx.cli.data.options import DatasetDir, KeyFile, open_given


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
    from phalanx.data.build.look import compare_datasets, named_changes

    datasets = open_given(first, key), open_given(second, key)
    differences = compare_datasets(*datasets)
    named = list(named_changes(*datasets, documents))
    print_rows(differences["changed"])
    print_figures({f"documents {name}": value for name, value in differences["documents"].items()})
    print_rows(named)
    return Answer({**differences, "named": named})
