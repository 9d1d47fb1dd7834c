"""Key files: readable by their owner only from the first moment, never overwritten."""

import os
import stat
from pathlib import Path

from phalanx.errors import CertificateError

MAX_FILE_BYTES = 64 * 1024


def make_private_directory(path: Path) -> None:
    """Create a directory with mode 0700, or accept an existing one that no other user can enter.

    Raises:
        CertificateError: It cannot be made, or others have access to it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as exc:
        raise CertificateError(f"{path}: cannot be made a directory for keys ({exc.strerror})") from exc
    if mode & 0o077:
        raise CertificateError(
            f"{path}: mode is {mode:04o}, expected 0700 where keys live; chmod 700 it or name a new one"
        )


def write_private(path: Path, data: bytes) -> None:
    """Write a new file with mode 0600 and force it to disk.

    Raises:
        CertificateError: The file exists already, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError as exc:
        raise CertificateError(f"{path}: exists already and is not overwritten; choose another place") from exc
    except OSError as exc:
        raise CertificateError(f"{path}: cannot be written ({exc.strerror})") from exc


def write_public(path: Path, data: bytes) -> None:
    """Write a file that holds no secret, in the place of an earlier one."""
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.unlink(missing_ok=True)
        write_private(temporary, data)
        temporary.replace(path)
    except OSError as exc:
        raise CertificateError(f"{path}: cannot be written ({exc.strerror})") from exc


def read_private(path: Path, made_by: str = "`phalanx invite` or `phalanx pki` makes it") -> bytes:
    """Read a key file; `made_by` tells where a missing one comes from.

    Raises:
        CertificateError: It is missing, over-long, no plain file, or others have access to it.
    """
    return _read_file(path, made_by, private=True)


def read_public(path: Path) -> bytes:
    """Read a certificate file."""
    return _read_file(path, "`phalanx invite` or `phalanx pki` makes it", private=False)


def _read_file(path: Path, made_by: str, *, private: bool) -> bytes:
    try:
        # opened first and asked afterwards: what is checked is what is read
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as exc:
        raise CertificateError(f"{path}: cannot be read ({exc.strerror}); {made_by}").with_facts(
            code="PHX-V011", file=str(path), found=exc.strerror or "", expected="a key or a certificate", do=made_by
        ) from exc
    if not stat.S_ISREG(status.st_mode) or len(data) > MAX_FILE_BYTES:
        raise CertificateError(f"{path}: expected a file of at most {MAX_FILE_BYTES} bytes")
    mode = stat.S_IMODE(status.st_mode)
    if private and mode & 0o077:
        raise CertificateError(
            f"{path}: mode is {mode:04o}, so others may have read this key; issue a new one, keep it at 0600"
        )
    return data
