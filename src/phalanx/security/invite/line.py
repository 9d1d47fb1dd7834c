"""One question and one answer over TLS: a line of JSON each, bounded in bytes and in time."""

import socket
import ssl
import time
from pathlib import Path
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import FrameError, PeerLostError
from phalanx.security.crypto import parse_canonical

MAX_BYTES = 16 * 1024
EXCHANGE_S = 10.0


def server_context(home: Path) -> ssl.SSLContext:
    """Return TLS 1.3 with the certificate and key of a party's directory."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # no state of a stranger is kept
    context.num_tickets = 0
    context.load_cert_chain(home / "certificate.pem", home / "tls.key")
    return context


def client_context(authority_pem: bytes | None) -> ssl.SSLContext:
    """Return a TLS 1.3 context that trusts one authority; with None it trusts every server, for public data only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if authority_pem is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=authority_pem.decode("ascii"))
    return context


def send_object(connection: socket.socket, fields: dict[str, Any]) -> None:
    """Send one object."""
    try:
        connection.sendall(canonical_json(fields) + b"\n")
    except OSError as exc:
        raise PeerLostError(f"the other end is gone ({exc})") from exc


def receive_object(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the one object that the other end sends.

    Args:
        deadline: Time of `time.monotonic`; a slow sender does not lengthen it.
    """
    raw = b""
    try:
        while not raw.endswith(b"\n"):
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = connection.recv(4096)
            if not part:
                raise PeerLostError("the other end closed the connection without an answer")
            raw += part
            if len(raw) > MAX_BYTES:
                raise FrameError(f"more than {MAX_BYTES} bytes came")
    except OSError as exc:
        raise PeerLostError(f"the other end is gone or silent ({exc})") from exc
    try:
        return parse_canonical(raw[:-1])
    except ValueError as exc:
        raise FrameError(f"no JSON object came: {exc}") from exc


def read_text_field(fields: dict[str, Any], name: str, most: int = MAX_BYTES) -> str:
    """Return a text of an object."""
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise FrameError(f"{name}: missing, no text or over-long")
    return value
