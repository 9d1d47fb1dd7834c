"""Memory for keys: in no other process's reach, not in the kernel's own map, never swapped, in no core dump."""

import ctypes
import mmap
import os
import resource
from pathlib import Path

from phalanx.closing import Closeable
from phalanx.security.isolation import kernel
from phalanx.security.isolation.report import Measure, MeasureFinding

_SWAPS = Path("/proc/swaps")


class SecretMemory(Closeable):
    """Memory that the kernel took out of its own map (memfd_secret): neither /proc nor a debugger can read it.

    What Python computes from it lies elsewhere again; it keeps long-lived keys, not everything that was derived.

    Raises:
        OSError: The kernel has none to give, or the user may lock no more memory.
    """

    def __init__(self, size: int) -> None:
        fd = kernel.system_call(kernel.MEMFD_SECRET, os.O_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        # a forked child would share it
        self._map.madvise(mmap.MADV_DONTFORK)
        self._view = memoryview(self._map)

    @property
    def writable_view(self) -> memoryview:
        """Its bytes, to be written and read."""
        return self._view

    @property
    def memory_address(self) -> int:
        """Address in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Overwrite and give back; closing twice is harmless."""
        if self._map.closed:
            return
        self._view[:] = bytes(len(self._view))
        self._view.release()
        self._map.close()

    def __repr__(self) -> str:
        return "SecretMemory(...)"


def find_secret_memory() -> MeasureFinding:
    """Try whether there is memory for keys."""
    try:
        with SecretMemory(mmap.PAGESIZE) as memory:
            memory.writable_view[:1] = b"\x01"
    except OSError as exc:
        detail = f"memfd_secret: {exc.strerror}; Linux 5.14 or later, and before 6.5 secretmem.enable=1 at boot"
        return MeasureFinding(Measure.SECRET_MEMORY, False, detail)
    return MeasureFinding(Measure.SECRET_MEMORY, True, "memfd_secret gives memory for keys")


def prevent_swapping() -> MeasureFinding:
    """Lock this process's memory where the user may lock any amount; else look whether the machine swaps at all."""
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY:
        try:
            kernel.lock_memory()
        except OSError as exc:
            return MeasureFinding(Measure.NO_SWAP, False, f"mlockall: {exc.strerror}")
        return MeasureFinding(Measure.NO_SWAP, True, "all of its memory is locked")
    try:
        used = _SWAPS.read_text(encoding="ascii").splitlines()[1:]
    except OSError as exc:
        return MeasureFinding(Measure.NO_SWAP, False, f"{_SWAPS}: {exc.strerror}")
    if used:
        return MeasureFinding(
            Measure.NO_SWAP,
            False,
            f"the machine swaps to {used[0].split()[0]}; swapoff -a, or lift the limit on locked memory (ulimit -l)",
        )
    return MeasureFinding(Measure.NO_SWAP, True, "the machine swaps to nothing now")
