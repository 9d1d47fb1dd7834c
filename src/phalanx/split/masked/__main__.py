"""A masked worker behind a sandbox: ``python -m phalanx.split.masked WORKER.toml NUMBER``, with a socket there."""

import socket
import sys
from pathlib import Path

from phalanx.config import escape_controls, load_config
from phalanx.errors import PhalanxError
from phalanx.split.masked.remote import PipedWorkerConfig, serve_pipe


def main(path: str, number: str) -> int:
    """Be the worker and return an exit code."""
    try:
        serve_pipe(load_config(Path(path), PipedWorkerConfig), socket.socket(fileno=int(number)))
    except PhalanxError as exc:
        sys.stderr.write(f"masked worker: {escape_controls(str(exc))}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
