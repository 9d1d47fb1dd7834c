"""Ask a server for its health as a probe of Kubernetes or compose: with a key out of a file, since no route is open.

``python -m phalanx.serve.probe --port 8443 --path /health/ready --key-file probe.key --authority ca.crt`` exits 0 where
the answer has status 200, and 1 otherwise. Only the standard library is imported, for it runs every few seconds.
"""

import argparse
import socket
import ssl
import sys
from contextlib import ExitStack
from pathlib import Path

_TIMEOUT_S = 8.0
_MAX_SECRET_BYTES = 1024


def probe_server(options: argparse.Namespace) -> int:
    """Return the status of the answer.

    Raises:
        OSError: There is no answer in time, its certificate is of nobody whom `authority` signed, or a file is missing.
    """
    with options.key_file.open("rb") as file:
        secret = file.read(_MAX_SECRET_BYTES).decode("ascii").strip()
    if not secret.isprintable():
        raise ValueError("the key has characters that no header may have")
    request = f"GET {options.path} HTTP/1.1\r\nHost: {options.server_name}\r\nAuthorization: Bearer {secret}\r\n"
    with ExitStack() as stack:
        connection: socket.socket = stack.enter_context(
            socket.create_connection(("127.0.0.1", options.port), timeout=_TIMEOUT_S)
        )
        if options.authority is not None:
            context = ssl.create_default_context(cafile=options.authority)
            connection = stack.enter_context(context.wrap_socket(connection, server_hostname=options.server_name))
        connection.sendall(f"{request}Connection: close\r\n\r\n".encode("ascii"))
        words = stack.enter_context(connection.makefile("rb")).readline(256).split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise ValueError("no HTTP")
    return int(words[1])


def main(arguments: list[str] | None = None) -> int:
    """Probe once; return the exit code, and write why it is not 0, without the key."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--authority", type=Path, help="who signed the certificate; plain HTTP without it")
    parser.add_argument("--server-name", default="localhost", help="name in the certificate")
    parser.add_argument("--any-status", action="store_true", help="any answer but 401 will do: the process lives")
    options = parser.parse_args(arguments)
    try:
        status = probe_server(options)
    except (OSError, ValueError) as exc:
        sys.stderr.write(f"probe: {type(exc).__name__}: {exc}\n")
        return 1
    is_well = status == 200 or (options.any_status and status != 401)
    if not is_well:
        sys.stderr.write(f"probe: status {status}\n")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
