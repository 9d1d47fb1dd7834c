"""``phalanx data new-key`` and ``rotate``: the key of encrypted datasets."""

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.answers.answer import Answer
from phalanx.cli.data.options import DatasetDir


def new_key(file: Annotated[Path, typer.Argument(metavar="FILE", help="New file, readable by you only.")]) -> Answer:
    """Create a random key for encrypted datasets; without the key they cannot be read."""
    from phalanx.data.shards import SealKey

    name = SealKey.create_file(file).name
    typer.echo(f'{file}: key {name}; in the recipe: [output] key = "{file}"')
    return Answer({"file": file, "key": name})


def rotate(
    directory: DatasetDir,
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The current key.")],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The new key.")],
) -> Answer:
    """Wrap a dataset's data key with a new key; shards and signature stay, and older copies open with the old key."""
    from phalanx.data.shards import SealKey, rewrap_data_key

    name = rewrap_data_key(directory, SealKey.from_file(key), SealKey.from_file(to))
    typer.echo(f"{directory}: now opens with key {name} only; put its path into data.dataset.key_file")
    return Answer({"directory": directory, "key": name})
