import ctypes
import ctypes.util
import json
import os
import resource
from importlib.util import find_spec
from pathlib import Path

import pytest

_NAMESPACES = 0x7C020000


def answer_of(call) -> int:
    """What a system call says to a child process, so that this one keeps its namespaces."""
    child = os.fork()
    if child == 0:
        os._exit(0 if call(ctypes.CDLL(None, use_errno=True)) >= 0 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lacking() -> list[str]:
    """What this machine cannot give, found without the code under test."""
    libc = ctypes.CDLL(None, use_errno=True)
    unlimited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] == resource.RLIM_INFINITY
    found = {
        "pyseccomp (pip install phalanx-train[sandbox])": find_spec("pyseccomp") is not None,
        "libseccomp": ctypes.util.find_library("seccomp") is not None,
        "user namespaces": answer_of(lambda libc: libc.unshare(_NAMESPACES)) == 0,
        "Landlock 3 (Linux 6.2)": libc.syscall(444, None, 0, 1) >= 3,
        "memfd_secret": answer_of(lambda libc: libc.syscall(447, 0)) == 0,
        "memory without swap": unlimited or len(Path("/proc/swaps").read_text().splitlines()) == 1,
    }
    return [name for name, there in found.items() if not there]


@pytest.fixture(scope="session")
def sandbox_works():
    """Skips where the machine cannot give the whole tier, and says what is lacking."""
    if missing := lacking():
        pytest.skip(f"this machine lacks {', '.join(missing)}")


class Pipe:
    """One pipe: the child's end is a number, what came is JSON."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def close_writing(self) -> None:
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    def everything(self) -> bytes:
        """What was written until the last holder of the other end has gone."""
        self.close_writing()
        data = b""
        while chunk := os.read(self.reading, 65536):
            data += chunk
        return data

    def line(self):
        """The next line, as JSON."""
        data = b""
        while not data.endswith(b"\n"):
            chunk = os.read(self.reading, 1)
            if not chunk:
                raise EOFError("the other end closed without a word")
            data += chunk
        return json.loads(data)

    def close(self) -> None:
        self.close_writing()
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1


@pytest.fixture
def pipe():
    made = Pipe()
    yield made
    made.close()


@pytest.fixture
def hold():
    """A pipe that keeps a victim alive while it is open."""
    made = Pipe()
    yield made
    made.close()
