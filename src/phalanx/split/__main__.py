"""The enclave behind a sandbox: ``python -m phalanx.split ENCLAVE.toml NUMBER [WORKER=NUMBER ...]``.

Under each number is a socket: a pipe to all parties, and one to each masked worker.
"""

import socket
import sys
from pathlib import Path

from phalanx.config import escape_controls, load_config
from phalanx.errors import PhalanxError
from phalanx.split.processes.local_enclave import EnclaveConfig
from phalanx.split.roles.serving import serve_enclave


def main(path: str, number: str, *workers: str) -> int:
    """Be the enclave and return an exit code."""
    try:
        named = {name: _open_socket(its) for name, _, its in (argument.partition("=") for argument in workers)}
        serve_enclave(load_config(Path(path), EnclaveConfig), _open_socket(number), named)
    except PhalanxError as exc:
        sys.stderr.write(f"enclave: {escape_controls(str(exc))}\n")
        return exc.exit_code
    return 0


def _open_socket(number: str) -> socket.socket:
    return socket.socket(fileno=int(number))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
