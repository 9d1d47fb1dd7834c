"""Connections of strangers to one port: each in a thread, so many at once, the idle ones making room for others."""

import contextlib
import ipaddress
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

_LOOK_S = 0.2
_HOST_BITS = 64
"""Of an IPv6 address that a household has for itself."""


@dataclass(eq=False)
class ServedConnection:
    """A connection.

    Attributes:
        is_known: Whether it has shown a secret; it then keeps its place until it ends.
    """

    connection: socket.socket
    host: str
    is_known: bool = False


class ConnectionServer:
    """Accepts connections on one port and has each served in a thread of its own.

    Args:
        listener: Listens already; closed by `close`.
        serve: Serves one connection and does not close it; errors of ours and of sockets are its own business.
        max_stay_s: A visitor is cut off after so many seconds, known or not.

    Guarantees:
        No caller is turned away for an address that others have too. Where all places are taken, a new connection takes
        that of the oldest stranger among those from the address with most strangers: idle connections, however many,
        keep a caller out only where `max_visitors` new ones come from elsewhere while it speaks.
    """

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[ServedConnection], None],
        *,
        max_visitors: int,
        max_stay_s: float,
    ) -> None:
        self._listener, self._serve, self._max_connections = listener, serve, max_visitors
        self._max_stay_s = max_stay_s
        self._connections: list[ServedConnection] = []
        self._changed = threading.Condition()
        self._closed = threading.Event()
        listener.settimeout(_LOOK_S)
        self._thread = threading.Thread(target=self._accept_connections, name="lobby", daemon=True)
        self._thread.start()

    def mark_known(self, visitor: ServedConnection) -> None:
        """Let a visitor keep its place until it ends."""
        with self._changed:
            visitor.is_known = True

    def close(self) -> None:
        """Take no more connections, cut unknown visitors off, and finish with the known ones."""
        self._closed.set()
        self._thread.join()
        self._listener.close()
        with self._changed:
            for visitor in self._connections:
                if not visitor.is_known:
                    _cut_connection(visitor.connection)
            self._changed.wait_for(lambda: not self._connections, self._max_stay_s)

    def _accept_connections(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                # such as too many open files: what is open ends within seconds
                self._closed.wait(_LOOK_S)
                continue
            visitor = ServedConnection(connection, str(address[0]))
            if self._admit_connection(visitor):
                threading.Thread(target=self._serve_connection, args=(visitor,), daemon=True).start()
            else:
                connection.close()

    def _admit_connection(self, visitor: ServedConnection) -> bool:
        """Give a visitor a place, that of another one where all are taken."""
        with self._changed:
            if len(self._connections) >= self._max_connections:
                strangers = [other for other in self._connections if not other.is_known]
                if not strangers:
                    return False
                crowds = Counter(_address_block(other.host) for other in strangers)
                crowded = max(crowds.values())
                leaving = next(other for other in strangers if crowds[_address_block(other.host)] == crowded)
                self._connections.remove(leaving)
                _cut_connection(leaving.connection)
            self._connections.append(visitor)
            return True

    def _serve_connection(self, visitor: ServedConnection) -> None:
        # each read has a timeout of its own, so that only this bounds one that comes byte by byte
        timer = threading.Timer(self._max_stay_s, _cut_connection, (visitor.connection,))
        timer.daemon = True
        timer.start()
        try:
            self._serve(visitor)
        finally:
            timer.cancel()
            visitor.connection.close()
            with self._changed:
                if visitor in self._connections:
                    self._connections.remove(visitor)
                self._changed.notify_all()


def _address_block(host: str) -> str:
    """Return an IPv4 address, or the part of an IPv6 address that a household shares."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(int(address) >> _HOST_BITS)


def _cut_connection(connection: socket.socket) -> None:
    # that of a TLS socket would take away what the thread that reads from it works with
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
