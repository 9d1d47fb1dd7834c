"""An honest program in a sandbox: answers over the socket that it was given, reads and writes where it may."""

import socket
import sys
import tempfile
from pathlib import Path


def main(mode: str, *arguments: str) -> None:
    if mode == "echo":
        with socket.socket(fileno=int(arguments[0])) as connection:
            connection.sendall(connection.recv(64).upper())
    elif mode == "files":
        Path(arguments[1]).write_bytes(Path(arguments[0]).read_bytes() + b" and back")
    elif mode == "numbers":
        import numpy as np

        sys.exit(int(np.arange(4).sum()))
    elif mode == "scratch":
        with tempfile.NamedTemporaryFile() as file:
            sys.stdout.write(file.name)
    elif mode == "exit":
        sys.exit(int(arguments[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
