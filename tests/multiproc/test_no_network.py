"""A run needs nobody outside: it trains and reports in a network that has a loopback and nothing else."""

import ctypes
import fcntl
import os
import socket
import struct

import pytest

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41


def leave_the_network() -> None:
    """Move this process into a network of its own, with only a loopback that is up."""
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING))


def can_leave_the_network() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            leave_the_network()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def test_a_run_trains_and_reports_without_a_network(place, clean):
    if not can_leave_the_network():
        pytest.skip("this system lets nobody make a network namespace")

    process = place.train(before=leave_the_network)

    assert process.wait() == 0, process.text
    assert place.summary()["final_weights_digest"] == clean["final_weights_digest"]
    page = (place.path / "run" / "report.html").read_text()
    assert 'src="http' not in page and 'href="http' not in page
