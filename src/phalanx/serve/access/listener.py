"""The socket of a server: loopback unless told, TLS elsewhere, slow and many connections bounded."""

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Self

import uvicorn
from pydantic import Field, model_validator
from uvicorn.protocols.http.h11_impl import H11Protocol

from phalanx.config import RefusedKeyError, StrictModel
from phalanx.errors import ConfigError, describe_fault
from phalanx.serve.access.refusals import App
from phalanx.serve.access.request_bounds import RequestBounds

_log = logging.getLogger(__name__)
_OTHER_FILES = 256
_NUM_THREADS = 64
_CUT = "ASGI callable returned without completing response."
"""What uvicorn calls an answer that the door has cut."""


class ListenConfig(StrictModel):
    """Where a server listens.

    Attributes:
        port: 0 lets the system choose.
        certificate: TLS certificate with its chain, PEM.
        private_key: Private key of the certificate, PEM.
        client_authority: Authority whose certificates clients must show (mutual TLS), PEM.
        unsafe_plain_http: Serve other machines without TLS: keys and texts can then be read on the way. Only behind a
            proxy on a network of its own.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    certificate: Path | None = None
    private_key: Path | None = None
    client_authority: Path | None = None
    unsafe_plain_http: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.certificate is None) != (self.private_key is None):
            raise RefusedKeyError(
                "certificate and private_key go together",
                key="listen.certificate",
                found="one of the two",
                expected="both or none",
                do="set both",
            )
        if self.client_authority is not None and self.certificate is None:
            raise RefusedKeyError(
                "client_authority needs certificate and private_key",
                key="listen.client_authority",
                found="no certificate",
                expected="a server with TLS",
                do="set certificate and private_key",
            )
        if self.certificate is None and not self.unsafe_plain_http and not is_loopback(self.host):
            raise RefusedKeyError(
                f"host {self.host!r} can be reached by other machines, and without TLS they could read keys on the "
                "way; set certificate and private_key, or bind 127.0.0.1",
                key="listen.host",
                found=self.host,
                expected="a loopback address, or TLS",
                do="set certificate and private_key, or bind 127.0.0.1",
            )
        return self


def is_loopback(host: str) -> bool:
    """Whether an address or name is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_server(app: App, listen: ListenConfig, bounds: RequestBounds, drain_s: int = 30) -> uvicorn.Server:
    """Return a server that is not started yet.

    Args:
        drain_s: Seconds that requests may take to end after the server was told to stop.

    Guarantees:
        Headers such as X-Forwarded-For change no client address: ranges of addresses hold for the connection itself.

    Raises:
        ConfigError: A certificate or key cannot be read.
    """
    config = uvicorn.Config(
        app,
        host=listen.host,
        port=listen.port,
        # a class, so each server has bounds of its own
        http=type("BoundedProtocol", (_BoundedProtocol,), {"bounds": bounds}),
        # others accept connections without asking the listener
        loop="asyncio",
        ws="none",
        proxy_headers=False,
        server_header=False,
        date_header=False,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=min(30, max(1, int(bounds.header_timeout_s))),
        timeout_graceful_shutdown=drain_s,
        h11_max_incomplete_event_size=bounds.max_header_bytes + bounds.max_path_bytes + 1024,
        ssl_certfile=listen.certificate,
        ssl_keyfile=listen.private_key,
        ssl_ca_certs=None if listen.client_authority is None else str(listen.client_authority),
        ssl_cert_reqs=ssl.CERT_NONE if listen.client_authority is None else ssl.CERT_REQUIRED,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"listen: the certificate or its key cannot be used ({exc.strerror})") from exc
    if config.ssl is not None and listen.client_authority is not None:
        # a resumed session shows no certificate again, and each one gives a newer ticket: one that ended would count on
        config.ssl.options |= ssl.OP_NO_TICKET
        config.ssl.num_tickets = 0
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(_drop_messages)
    _allow_files(bounds)
    return _DrainingServer(config, bounds)


def _allow_files(bounds: RequestBounds) -> None:
    """Let the process open a file for each connection and one for what stands behind it, as far as the system allows.

    Many systems begin with 1,024; a server without a free file accepts nobody.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * bounds.max_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        _log.warning(
            "the system allows this process %d open files, and %d connections may need %d; raise the limit "
            "(ulimit -Hn), or lower bounds.max_connections",
            allowed,
            bounds.max_connections,
            needed,
        )


def _drop_messages(record: logging.LogRecord) -> bool:
    """Have a fault logged by its kind and place: messages of exceptions quote texts of clients."""
    fault = record.exc_info[1] if record.exc_info else None
    if fault is not None:
        record.msg, record.args = "a request failed inside: %s", (describe_fault(fault),)
        record.exc_info = record.exc_text = None
    elif record.msg == _CUT:
        record.msg = "an answer was cut: its key or model is out of service, or its client takes nothing"
    return True


def run_announced(server: uvicorn.Server, sock: socket.socket, announce: Callable[[], None]) -> None:
    """Serve on a socket that is bound, until the process is told to stop.

    Args:
        announce: Called once requests are taken, and a signal ends the server in order.
    """

    async def serve() -> None:
        # the default is a few threads, which the long texts of one key could take from all others
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_THREADS, "serve"))
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        while not (server.started or serving.done()):
            await asyncio.sleep(0.01)
        if server.started:
            announce()
        await serving

    asyncio.run(serve())


def bind_socket(listen: ListenConfig) -> socket.socket:
    """Return a socket that listens, for `uvicorn.Server.serve`, so that its port is known before the server starts."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    # with the protocol named, asyncio turns Nagle's algorithm off: without it each answer takes 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((listen.host, listen.port))
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"listen: {listen.host} port {listen.port} cannot be listened on ({exc.strerror}); "
            "choose another --port or --host"
        ) from exc
    return sock


class _Connection(socket.socket):
    """A connection that gives its place back when it is closed."""

    free_place: Callable[[], None] | None = None

    def close(self) -> None:
        super().close()
        free_place, self.free_place = self.free_place, None
        if free_place is not None:
            free_place()


class _BoundedListener(socket.socket):
    """The socket of a server with a bounded number of connections: they count before TLS begins, of all that come."""

    def __init__(self, sock: socket.socket, bounds: RequestBounds) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=os.dup(sock.fileno()))
        self._bounds = bounds
        self._num_of_address: Counter[str] = Counter()

    def accept(self) -> tuple[socket.socket, Any]:
        plain, address = super().accept()
        connection = _Connection(plain.family, plain.type, plain.proto, fileno=plain.detach())
        host, counts = str(address[0]), self._num_of_address
        if counts.total() >= self._bounds.max_connections or counts[host] >= self._bounds.max_connections_per_address:
            connection.close()
            raise ConnectionAbortedError
        counts[host] += 1

        def free_place() -> None:
            counts[host] -= 1
            if not counts[host]:
                del counts[host]

        connection.free_place = free_place
        return connection, address


class _DrainingServer(uvicorn.Server):
    """A server after which the process goes on: uvicorn's own would end it by the signal that stopped the server."""

    def __init__(self, config: uvicorn.Config, bounds: RequestBounds) -> None:
        super().__init__(config)
        self._bounds = bounds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([_BoundedListener(sock, self._bounds) for sock in sockets or ()])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


class _BoundedProtocol(H11Protocol):
    """HTTP of uvicorn with two additions: time limits for headers, and for clients that do not read their answer."""

    bounds: RequestBounds
    _timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # whatever a client does not take is timed, also where all of it would fit into this process's memory; at 0, a
        # transport of TLS pauses before anything is written
        transport.set_write_buffer_limits(high=1, low=0)
        self._await_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        loop = asyncio.get_running_loop()
        self._send_timer = loop.call_later(self.bounds.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_send_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._cancel_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        cycle = self.cycle
        super().data_received(data)
        if self.cycle is not cycle:
            self._cancel_timer()
        elif self._timer is None and (cycle is None or cycle.response_complete):
            # a further request begins on a connection that was kept open
            self._await_headers()

    def _await_headers(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.bounds.header_timeout_s, self.transport.abort)

    def _cancel_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
