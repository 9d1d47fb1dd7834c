"""Files that a command reads and writes whole: a full disk or a missing folder is said, never shown as a traceback."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from phalanx.errors import DiskError, InputError, PhalanxError, is_disk_fault, writing_cure


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole, its folder included."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as exc:
        kind, do = DiskError if is_disk_fault(exc) else InputError, writing_cure(exc)
        raise kind(f"{path}: cannot be written ({exc.strerror}); {do}").with_facts(
            file=str(path), found=exc.strerror or "", expected="the file", do=do
        ) from exc


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Name the file whose keys are checked within, in errors that name no narrower one."""
    try:
        yield
    except PhalanxError as exc:
        if "file" not in exc.error_facts:
            exc.with_facts(file=str(path))
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8; as `write_file`."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as exc:
        do = "rename the files that it names"
        raise InputError(f"{path}: cannot be written (a name in it is not UTF-8); {do}").with_facts(
            file=str(path), do=do
        ) from exc
    write_file(path, data)


def read_file(path: Path) -> bytes:
    """Read a file whole."""
    try:
        return path.read_bytes()
    except OSError as exc:
        raise InputError(f"{path}: cannot be read ({exc.strerror})").with_facts(file=str(path)) from exc
