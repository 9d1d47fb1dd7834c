"""Holds a secret: ``python -m isolation_victim TELL_FD HOLD_FD``; or crashes: ``crash DIRECTORY SECRET``."""

import ctypes
import hashlib
import json
import os
import resource
import secrets
import sys

from isolation_rights import drop_rights


def hold(tell: int, until: int) -> None:
    """Keep a secret in memory until the other end of a pipe is closed."""
    drop_rights()
    secret = ctypes.create_string_buffer(secrets.token_bytes(32), 32)
    told = {"address": ctypes.addressof(secret), "digest": hashlib.sha256(secret.raw).hexdigest(), "pid": os.getpid()}
    os.write(tell, json.dumps(told).encode() + b"\n")
    os.read(until, 1)


def crash(directory: str, secret: str) -> None:
    """Die of a memory fault, having asked for core dumps."""
    kept = secret.encode() * 2
    os.chdir(directory)
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    ctypes.string_at(0)
    os.write(2, kept)


if __name__ == "__main__":
    if sys.argv[1] == "crash":
        crash(*sys.argv[2:])
    hold(int(sys.argv[1]), int(sys.argv[2]))
