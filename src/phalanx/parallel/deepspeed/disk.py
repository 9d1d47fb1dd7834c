"""The directory for a rank's share of the state: on a real disk, used by one rank alone, emptied after the run."""

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from phalanx.errors import ConfigError

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_GIB = 2**30
_LOCK = "lock"


def why_no_disk(directory: Path, needed_bytes: int) -> str | None:
    """Say why a directory cannot hold what ranks of this machine keep; None where it can.

    Args:
        directory: Named in the run file; it must be there, so that a disk that is not mounted is noticed.
    """
    if not directory.is_dir():
        return f"{directory} is no directory; mount the disk and make the folder, on every machine"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} cannot be written; give this user the right, or name another one"
    kind = file_system(directory)
    if kind in _IN_MEMORY:
        return f"{directory} is on {kind}, which is the host's memory; name a folder on a disk"
    lacking = _why_no_direct_files(directory)
    if lacking is not None:
        return lacking
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        return (
            f"{directory} has {free / _GIB:.1f} GiB left and the ranks of this machine keep "
            f"{needed_bytes / _GIB:.1f} GiB in it; free some, or name a larger disk"
        )
    return None


def why_no_locked_memory(needed_bytes: int) -> str | None:
    """Say why buffers that the disk reads into cannot be locked in memory, which would end a rank with SIGSEGV."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or needed_bytes <= limit or _can_lock(limit + mmap.PAGESIZE):
        return None
    return (
        f"a rank locks {needed_bytes / 2**20:.0f} MiB of memory for the disk, and may lock {limit / 2**20:.0f} MiB; "
        'raise "ulimit -l", or lower update_at_once'
    )


@contextlib.contextmanager
def own_folder(directory: Path, digest: str, rank: int) -> Iterator[Path]:
    """Open a folder for one rank alone; files of an earlier start are removed first, and all files at the end.

    Args:
        directory: Named in the run file.
        digest: Digest of the run's config, in hex.
    """
    folder = directory / f"phalanx-{digest[:16]}-rank-{rank}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        # in a shared directory another user may have put a link there, and what lies behind it would be emptied
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ConfigError(
                f"deepspeed.directory: {folder} is a link, or somebody else's; remove it, or name another directory"
            )
        folder.chmod(0o700)
        lock = (folder / _LOCK).open("wb")
    except OSError as exc:
        raise ConfigError(f"deepspeed.directory: {folder} cannot be made ({exc.strerror})") from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise ConfigError(
                f"deepspeed.directory: {folder} is in use by another process with the same run file; wait for its end, "
                "or name another directory"
            ) from exc
        for inner in folder.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner, ignore_errors=True)
            elif inner.name != _LOCK:
                inner.unlink()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def file_system(path: Path) -> str:
    """Kind of the file system that a path is on; empty where the kernel does not say."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(mount.mountpoint)]
    # of several mounts at one place the last one is seen
    return max(reversed(mounts), key=lambda mount: len(Path(mount.mountpoint).parts)).fstype if mounts else ""


def _why_no_direct_files(directory: Path) -> str | None:
    """Files must be read and written past the kernel's cache, or they would fill the memory that they are to spare."""
    if not hasattr(os, "O_DIRECT"):
        return "this system has no files past the kernel's cache (O_DIRECT); use Linux"
    name = tempfile.mktemp(prefix=".phalanx-", dir=directory)  # noqa: S306 - opened with O_EXCL below
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError as exc:
        return f"{directory}: files past the kernel's cache (O_DIRECT) are refused ({exc.strerror}); name a local disk"
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)
    return None


def _can_lock(size: int) -> bool:
    """Whether this process may lock more than its limit says, as those with CAP_IPC_LOCK may."""
    libc = ctypes.CDLL(None)
    with mmap.mmap(-1, size) as memory:
        view = ctypes.c_char.from_buffer(memory)
        address, length = ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size)
        is_locked = libc.mlock(address, length) == 0
        if is_locked:
            libc.munlock(address, length)
        # a mapping that something still looks at cannot be closed
        del view
    return bool(is_locked)
