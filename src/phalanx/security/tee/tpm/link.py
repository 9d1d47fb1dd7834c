"""The way to a TPM: Linux's device, or the socket of a software one. Commands go in as bytes, responses come out.

Addresses are written as tpm2-tools write them: ``device:/dev/tpmrm0``, ``swtpm:path=/run/tpm/socket``,
``swtpm:host=localhost,port=2321``.
"""

import os
import socket
from typing import Protocol

from phalanx.errors import TpmError

DEFAULT_ADDRESS = "device:/dev/tpmrm0"
_HEADER_BYTES, _MAX_RESPONSE_BYTES = 10, 4096
_PATIENCE_S = 60.0


class TpmLink(Protocol):
    """One connection to one TPM."""

    @property
    def is_software(self) -> bool:
        """Whether it is known to lead to a program, not to a chip."""

    def exchange_command(self, command: bytes) -> bytes:
        """Send a command and return its response."""

    def close(self) -> None:
        """End the connection; closing twice is harmless."""


def open_link(address: str = DEFAULT_ADDRESS) -> TpmLink:
    """Connect to a TPM."""
    kind, _, rest = address.partition(":")
    try:
        if kind == "device" and rest:
            return _DeviceLink(rest)
        if kind == "swtpm":
            return _SocketLink(_connect_socket(rest))
    except OSError as exc:
        raise TpmError(
            f"TPM at {address}: cannot be opened ({exc.strerror}); is it there, may this user open it?"
        ) from exc
    except (KeyError, ValueError) as exc:
        raise TpmError(f"TPM at {address}: {_EXPECTED}") from exc
    raise TpmError(f"TPM at {address}: {_EXPECTED}")


_EXPECTED = "expected device:PATH, swtpm:path=PATH or swtpm:host=NAME,port=NUMBER"


class _DeviceLink:
    """A character device: one write is one command, one read its response."""

    is_software = False

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def exchange_command(self, command: bytes) -> bytes:
        try:
            os.write(self._fd, command)
            return os.read(self._fd, _MAX_RESPONSE_BYTES)
        except OSError as exc:
            raise TpmError(f"TPM at {self._path}: {exc.strerror}") from exc

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _SocketLink:
    """The data channel of swtpm: commands and responses, each of the length in its header."""

    is_software = True

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def exchange_command(self, command: bytes) -> bytes:
        try:
            self._connection.sendall(command)
            head = self._receive_bytes(_HEADER_BYTES)
            size = int.from_bytes(head[2:6], "big")
            if not _HEADER_BYTES <= size <= _MAX_RESPONSE_BYTES:
                raise TpmError(f"TPM: a response of {size} bytes, allowed {_MAX_RESPONSE_BYTES}")
            return head + self._receive_bytes(size - _HEADER_BYTES)
        except OSError as exc:
            raise TpmError(f"TPM: the connection broke ({exc})") from exc

    def close(self) -> None:
        self._connection.close()

    def _receive_bytes(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._connection.recv(size - len(data))
            if not chunk:
                raise TpmError("TPM: the connection was closed in the middle of a response")
            data += chunk
        return data


def _connect_socket(rest: str) -> socket.socket:
    options = dict(option.split("=", 1) for option in rest.split(","))
    if set(options) == {"path"}:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(_PATIENCE_S)
            connection.connect(options["path"])
        except OSError:
            connection.close()
            raise
        return connection
    if set(options) == {"host", "port"}:
        return socket.create_connection((options["host"], int(options["port"])), timeout=_PATIENCE_S)
    raise ValueError(rest)
