"""A local server that speaks the protocol of S3, in a process of its own."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("%s:%d" % server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""
ACCESS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def need_object_store() -> None:
    """Skip a module where the server is not installed, which costs a second to import and runs elsewhere."""
    for package in ("s3fs", "moto", "flask"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"could not import {package!r}", allow_module_level=True)


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """Run the server.

    Yields:
        Its address, for ``AWS_ENDPOINT_URL``.
    """
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **ACCESS},
    ) as process:
        yield f"http://{process.stdout.readline().strip()}"
        process.stdin.close()
