"""The store of finished work: directories that appear whole or not at all, each under a digest of what decided it."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import DataError, DiskError, InputError, is_disk_fault, writing_cure

SUMMARY = "summary.json"
_UNFINISHED = ".unfinished-"


def work_key(decided_by: Mapping[str, Any]) -> str:
    """Return the name of a piece of work: 32 hex characters over everything that decides its result."""
    return hashlib.sha256(canonical_json(decided_by)).hexdigest()[:32]


class WorkStore:
    """Finished work in one directory, shared by all processes of a build.

    Work is written below a temporary name, brought to the disk, and renamed. What a killed process leaves behind is
    never read, and is removed when the build is over.
    """

    def __init__(self, home: Path) -> None:
        self._home = home

    def work_directory(self, key: str) -> Path:
        """Return the directory of finished work."""
        return self._home / key

    def find_summary(self, key: str) -> dict[str, Any] | None:
        """Return the summary of finished work; None where there is none yet."""
        path = self.work_directory(key) / SUMMARY
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as exc:
            raise DataError(f"{path}: cannot be read ({exc}); delete {path.parent} to make it again") from exc
        return dict(content)

    def store_work(self, key: str, work: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
        """Do a piece of work and keep it.

        InputError: Nothing may be written there.
        """
        try:
            directory = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._home))
        except OSError as exc:
            raise not_written(self._home, exc) from exc
        try:
            summary = dict(work(directory))
            (directory / SUMMARY).write_bytes(canonical_json(summary))
            for path in (*directory.iterdir(), directory):
                sync_to_disk(path)
            self._publish_directory(directory, key)
        except OSError as exc:
            raise not_written(directory, exc) from exc
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return summary

    def _publish_directory(self, directory: Path, key: str) -> None:
        try:
            directory.rename(self.work_directory(key))
        except OSError:
            # another process was first, with the same bytes
            if not self.work_directory(key).is_dir():
                raise
        sync_to_disk(self._home)


def sync_to_disk(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def not_written(path: Path, exc: OSError) -> InputError:
    """Say that a build cannot write, and what to do."""
    kind = DiskError if is_disk_fault(exc) else InputError
    do = f"{writing_cure(exc)}, then run the build again"
    return kind(f"{path}: cannot be written ({exc.strerror}); {do}").with_facts(file=str(path), do=do)
