"""``phalanx data verify`` and ``diff``: every byte of a dataset checked, two datasets compared."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import say_figures, say_rows
from phalanx.cli.data.options import DatasetDir, KeyFile, Signer, opened


def verify(directory: DatasetDir, *, key: KeyFile = None, signer: Signer = None) -> Answer:
    """Check the signature, every leaf of every file, and that the account adds up to the byte."""
    from phalanx.data.build.look import verify_account
    from phalanx.data.build.read_back import check_tokenizer

    dataset = opened(directory, key, signer)
    files = list(dataset.verify())
    check_tokenizer(dataset)
    verify_account(dataset)
    figures = {
        "verdict": "every byte is the one that was signed, and the account adds up",
        "digest": dataset.digest,
        "signer": dataset.signer,
        "trust": dataset.trust,
        "files": len(files),
        "documents": dataset.manifest.documents,
        "tokens": dataset.manifest.tokens,
    }
    say_figures(figures)
    return Answer(figures)


def diff(
    first: DatasetDir,
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="The directory of another dataset.")],
    *,
    documents: Annotated[
        int, typer.Option("--documents", metavar="N", min=0, help="Name so many documents that only one has.")
    ] = 10,
    key: KeyFile = None,
) -> Answer:
    """Say what is other in a second dataset: sources, steps, thresholds, counts, documents by their digests."""
    from phalanx.data.build.compare import compare, named_changes

    datasets = opened(first, key), opened(second, key)
    found = compare(*datasets)
    named = list(named_changes(*datasets, documents))
    say_rows(found["changed"])
    say_figures({f"documents {name}": value for name, value in found["documents"].items()})
    say_rows(named)
    return Answer({**found, "named": named})
