"""Options of the verbs that read a dataset."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from phalanx.data.shards import Dataset

DatasetDir = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a dataset.")]
KeyFile = Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Key file of an encrypted dataset.")]
Signer = Annotated[
    str | None,
    typer.Option("--signer", metavar="FINGERPRINT", help="Expected fingerprint of the signing key."),
]


def open_given(directory: Path, key: Path | None, signer: str | None = None) -> "Dataset":
    """Open a dataset, with the key in a file where it is encrypted.

    Raises:
        DataError: There is none, it is altered, or the key or the signer is another one.
    """
    from phalanx.data.shards import SealKey, open_dataset

    return open_dataset(directory, signer, None if key is None else SealKey.from_file(key))
