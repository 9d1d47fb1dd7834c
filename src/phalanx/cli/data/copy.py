"""``phalanx data copy``: a dataset to an object store, or from one."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.console import print_figures
from phalanx.cli.data.options import Signer


def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Directory or address of a dataset.")],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="An address such as s3://bucket/name, or a new directory.")
    ],
    signer: Signer = None,
) -> Answer:
    """Copy a dataset to or from an object store; an incomplete copy cannot be opened.

    An interrupted copy to a store continues where it ended. A copy from a store takes only files that the signed
    manifest names, and verifies every leaf that is not encrypted before this command ends.
    """
    from phalanx.data.shards import open_dataset
    from phalanx.data.shards.stored import StoredDataset

    are_addresses = [is_address(place) for place in (source, target)]
    if are_addresses.count(True) != 1:
        raise typer.BadParameter("expected one directory and one address such as s3://bucket/name")
    if are_addresses[1]:
        signed = StoredDataset(target).upload_dataset(Path(source), signer)
    else:
        signed = StoredDataset(source).download_dataset(Path(target), signer)
        if signed.manifest.seal is None:
            for _ in open_dataset(Path(target), signer).verify():
                pass
    figures = {"from": source, "to": target, "digest": signed.statement.dataset, "signer": signed.signer}
    print_figures(figures)
    return Answer(figures)


def put_dataset(directory: Path, address: str) -> str:
    """Copy a dataset to an object store, and return the address."""
    from phalanx.data.shards.stored import StoredDataset

    StoredDataset(address).upload_dataset(directory)
    return address


def is_address(place: str) -> bool:
    """Whether this is the address of an object store."""
    return "://" in place
