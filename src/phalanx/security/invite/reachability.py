"""The reachability probe: before it certifies a machine, the owner connects to its address, and the machine answers.

The owner sends 32 random bytes in hex, the machine the HMAC of them under the secret of its token, a line each.
"""

import contextlib
import hashlib
import hmac
import secrets
import socket
import time
from typing import Self

from phalanx.errors import FrameError, PeerLostError, TransportError
from phalanx.security.crypto import in_domain
from phalanx.security.invite.line import read_text_field, receive_object, send_object
from phalanx.security.invite.lobby import ConnectionServer, ServedConnection
from phalanx.security.invite.token import split_address

_PROBE_S = 3.0
_MAX_VISITORS = 32
_NONCE_BYTES = 32


class ReachabilityListener:
    """The port at which a machine will be reached, open for the reachability probe while it asks for its certificate.

    Args:
        port: The port; 0 takes any free one.
    """

    def __init__(self, bind: str, port: int, secret: str) -> None:
        self._secret = secret
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        try:
            self._listener = socket.create_server((bind, port), family=family)
        except OSError as exc:
            raise TransportError(
                f"{bind}:{port}: cannot listen ({exc.strerror}); is the port taken? --port names another"
            ) from exc
        self.port = int(self._listener.getsockname()[1])
        self._server: ConnectionServer | None = None

    def __enter__(self) -> Self:
        self._server = ConnectionServer(
            self._listener, self._answer_probe, max_visitors=_MAX_VISITORS, max_stay_s=_PROBE_S
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()

    def _answer_probe(self, visitor: ServedConnection) -> None:
        # another caller gets an answer that proves nothing to it, and blocks nobody
        with contextlib.suppress(OSError, TransportError):
            message = receive_object(visitor.connection, time.monotonic() + _PROBE_S)
            nonce = read_text_field(message, "knock", 2 * _NONCE_BYTES)
            send_object(visitor.connection, {"answer": _probe_answer(nonce, self._secret)})


def probe_reachability(address: str, secret: str) -> str | None:
    """Connect to where a machine wants to be reached, and see that the one with the secret answers.

    Returns:
        None when the machine answers; else a message for the machine, which does not tell what else listens there.
    """
    nonce, place = secrets.token_hex(_NONCE_BYTES), split_address(address)
    deadline = time.monotonic() + _PROBE_S
    try:
        with socket.create_connection(place, timeout=_PROBE_S) as connection:
            send_object(connection, {"knock": nonce})
            answer = read_text_field(receive_object(connection, deadline), "answer", 64)
        if hmac.compare_digest(answer, _probe_answer(nonce, secret)):
            return None
    except (OSError, PeerLostError, FrameError):
        pass
    return (
        f"{address} cannot be reached: the owner tried it from {_own_address(*place)} and within {_PROBE_S:.0f} s no "
        "machine with this token answered. Let TCP connections to that port through firewall and router, or name where "
        "others reach this machine with --advertise HOST and --port N; the token is still good"
    )


def _own_address(host: str, port: int) -> str:
    """Return the address from which this machine goes there, found without sending anything."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((host, port))
            return str(route.getsockname()[0])
    except OSError:
        return "an unknown address"


def _probe_answer(nonce: str, secret: str) -> str:
    return hmac.new(secret.encode(), in_domain("knock/1", nonce.encode()), hashlib.sha256).hexdigest()
