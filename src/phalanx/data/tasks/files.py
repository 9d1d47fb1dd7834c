"""The data files of tasks: where they lie, and what to say when one is missing."""

import os
from pathlib import Path

from phalanx.errors import DataError

DATA_VARIABLE = "PHALANX_DATA"
USUAL_FOLDERS = (Path("data"), Path("..") / "shared" / "data")


def find_file(home: Path | None, name: str, where_from: str) -> Path:
    """Find a data file; nothing is ever fetched from a network.

    Args:
        home: The folder that must hold it; None looks into `PHALANX_DATA`, then into `USUAL_FOLDERS`.
        name: Of the file.
        where_from: How to get it, for the error.

    Raises:
        DataError: It is not there.
    """
    folders = _folders() if home is None else (home,)
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    looked = ", ".join(str(folder) for folder in folders)
    raise DataError(
        f"{name}: not found in {looked}; {where_from}, and put it there or set {DATA_VARIABLE} to its folder"
    )


def _folders() -> tuple[Path, ...]:
    named = os.environ.get(DATA_VARIABLE)
    return (Path(named),) if named else USUAL_FOLDERS
