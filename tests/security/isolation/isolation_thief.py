"""Another process of the same user reads memory: ``python isolation_thief.py PID ADDRESS SIZE``; says what it got."""

import ctypes
import json
import os
import struct
import sys

from isolation_rights import drop_rights


def through_proc(pid: int, address: int, size: int) -> str:
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    return os.pread(fd, size, address).hex()


def through_the_system_call(pid: int, address: int, size: int) -> str:
    libc, buffer = ctypes.CDLL(None, use_errno=True), ctypes.create_string_buffer(size)
    local = struct.pack("PN", ctypes.addressof(buffer), size)
    if libc.process_vm_readv(pid, local, 1, struct.pack("PN", address, size), 1, 0) != size:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer.raw.hex()


def as_a_debugger(pid: int, address: int, size: int) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(16, pid, None, None) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.waitpid(pid, 0x40000000)
    words = [libc.ptrace(1, pid, ctypes.c_void_p(address + offset), None) for offset in range(0, size, 8)]
    libc.ptrace(17, pid, None, None)
    return b"".join(struct.pack("l", one) for one in words).hex()


if __name__ == "__main__":
    drop_rights()
    told = {}
    for way in (through_proc, through_the_system_call, as_a_debugger):
        try:
            told[way.__name__] = way(*map(int, sys.argv[1:]))
        except OSError as exc:
            told[way.__name__] = type(exc).__name__
    sys.stdout.write(json.dumps(told))
