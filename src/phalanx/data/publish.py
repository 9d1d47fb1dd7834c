"""Directories and files of results that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from phalanx.errors import DataError, writing_cure


def publish_directory(home: Path, fill: Callable[[Path], None]) -> None:
    """Make a directory: it is filled beside its place, made durable and then given its name.

    Args:
        home: Its place; where another process is first, that one's stays.

    Guarantees:
        A crash leaves no half-made result.
    """
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=home.parent))
    except OSError as exc:
        raise DataError(f"{home.parent}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc
    try:
        fill(directory)
        _sync_and_rename(directory, home)
    except OSError as exc:
        raise DataError(f"{directory}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def publish_file(path: Path, content: bytes) -> None:
    """Write a file of the cache whole or not at all; one with the same content stays."""
    try:
        if path.is_file() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=path.parent) as directory:
            spare = Path(directory) / path.name
            with spare.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            spare.replace(path)
    except OSError as exc:
        raise DataError(f"{path}: cannot be written ({exc.strerror}); {writing_cure(exc)}") from exc


def _sync_and_rename(directory: Path, home: Path) -> None:
    for path in (*directory.iterdir(), directory):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    try:
        directory.rename(home)
    except OSError:
        # another process was first; its result is checked like any other when it is opened
        if not home.exists():
            raise
