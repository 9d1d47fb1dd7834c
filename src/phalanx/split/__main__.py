"""The enclave behind a sandbox: ``python -m phalanx.split ENCLAVE.toml NUMBER``, with a socket under that number."""

import socket
import sys
from pathlib import Path

from phalanx.config import load_config
from phalanx.errors import PhalanxError
from phalanx.split.enclave_file import EnclaveConfig
from phalanx.split.server import serve


def main(path: str, number: str) -> int:
    """Be the enclave and return an exit code."""
    try:
        serve(load_config(Path(path), EnclaveConfig), socket.socket(fileno=int(number)))
    except PhalanxError as exc:
        sys.stderr.write(f"enclave: {exc}\n")
        return exc.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
