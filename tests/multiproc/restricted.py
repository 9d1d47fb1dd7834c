"""Become a command that has less than usual: ``python restricted.py RESTRICTION [COMMAND ...]``.

A program of its own and no function of the child after a fork: a fork while gRPC has threads sometimes aborts.
"""

import ctypes
import fcntl
import os
import resource
import socket
import struct
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP_RUNNING = 0x8914, 0x41


def no_large_files() -> None:
    """Let a write beyond the limit fail like one on a full disk; events, metrics and leaves are smaller than this."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, 120_000))


def no_network() -> None:
    """Move this process into a network of its own, with only a loopback that is up."""
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP_RUNNING))


RESTRICTIONS = {restriction.__name__: restriction for restriction in (no_large_files, no_network)}

if __name__ == "__main__":
    RESTRICTIONS[sys.argv[1]]()
    if sys.argv[2:]:
        os.execv(sys.argv[2], sys.argv[2:])
