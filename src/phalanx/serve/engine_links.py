"""Connections to one engine: HTTP/1.1 by h11 over asyncio, kept open between requests."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from typing import cast
from urllib.parse import urlsplit

import h11

from phalanx.errors import PeerGoneError, PeerLostError

_MAX_WAITING_BYTES = 256 * 1024
_MAX_HEAD_BYTES = 64 * 1024
_MAX_HEADS = 16
"""Provisional answers before one; ten thousand fit into what is read at once, and no client is served meanwhile."""
_EVENTS_A_TURN = 64
"""Parts of an answer after which other requests have their turn."""
_MAX_IDLE = 64
_IDLE_S = 4.0
"""Servers in use close a connection that is idle for five seconds or more."""


class EngineReply:
    """An answer whose head has arrived."""

    def __init__(self, link: "_Link", head: h11.Response) -> None:
        self._link = link
        self.status = head.status_code
        self.content_type = next(
            (value.decode("latin-1") for name, value in head.headers if name == b"content-type"), ""
        )

    async def read_pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes.

        Raises:
            PeerLostError: It ends too early, or is silent for too long.
        """
        while isinstance(event := await self._link.receive_event(), h11.Data):
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise PeerLostError("the answer broke off")

    def close(self) -> None:
        """Give the connection back; one whose answer is not over is cut, by which the engine learns to stop."""
        self._link.release()


class EngineLinks:
    """All connections to one engine.

    Args:
        headers: Sent with every request; one of them can be the secret.
        silence_s: Longest silence before and within an answer.

    Guarantees:
        A request is sent once, in one piece. A connection serves again where its answer was read to its end and not
        a byte came behind it. No proxy and no variable of the environment is asked.
    """

    def __init__(
        self, url: str, tls: ssl.SSLContext, headers: dict[str, str], connect_timeout_s: float, silence_s: float
    ) -> None:
        parts = urlsplit(url)
        self._tls = tls if parts.scheme == "https" else None
        self._host = str(parts.hostname)
        self._port = parts.port or (80 if self._tls is None else 443)
        self._prefix = parts.path.rstrip("/")
        self._headers = [("host", parts.netloc), *headers.items()]
        self._connect_timeout_s, self.silence_s = connect_timeout_s, silence_s
        self._idle: list[_Link] = []

    async def send_request(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: bytes
    ) -> EngineReply:
        """Send a request and return its answer when the head is there.

        Raises:
            PeerGoneError: The engine cannot be connected to.
            PeerLostError: It did not answer.
        """
        length = [("content-length", str(len(body)))] if body else []
        try:
            request = h11.Request(
                method=method, target=self._prefix + path, headers=[*self._headers, *headers, *length]
            )
        except h11.ProtocolError as exc:
            raise PeerLostError("a header of the request cannot be sent") from exc
        link = self._take_idle() or await self._open_link()
        try:
            return EngineReply(link, await link.exchange_heads(request, body))
        except BaseException:
            link.abort()
            raise

    @property
    def has_usable_link(self) -> bool:
        """Whether a further request needs no new connection."""
        return any(link.is_usable for link in self._idle)

    def keep_idle(self, link: "_Link") -> None:
        """Keep a connection for a further request."""
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(link)
        else:
            link.abort()

    def close(self) -> None:
        """Close the connections that are idle."""
        while self._idle:
            self._idle.pop().abort()

    def _take_idle(self) -> "_Link | None":
        """Return the connection that was used last and is still open."""
        while self._idle:
            link = self._idle.pop()
            if link.is_usable:
                return link
            link.abort()
        return None

    async def _open_link(self) -> "_Link":
        name = None if self._tls is None else self._host
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, link = await asyncio.get_running_loop().create_connection(
                    lambda: _Link(self), self._host, self._port, ssl=self._tls, server_hostname=name
                )
        except (OSError, TimeoutError) as exc:
            raise PeerGoneError("no connection came about") from exc
        return link


class _Link(asyncio.Protocol):
    """One connection, for one request at a time.

    Memory is bounded: it reads on when the received bytes have been taken.
    """

    _transport: asyncio.Transport

    def __init__(self, links: EngineLinks) -> None:
        self._links = links
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._received = bytearray()
        self._is_over = False
        self._change = asyncio.Event()
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._idle_since = 0.0
        self._num_events = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # a connection over TCP or TLS has no other kind
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > _MAX_WAITING_BYTES:
            self._transport.pause_reading()
        self._change.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self._change.set()
        self._may_write.set()

    def eof_received(self) -> None:
        self._is_over = True
        self._change.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    @property
    def is_usable(self) -> bool:
        """Whether nothing came since the last answer, the connection's end included."""
        return not self._is_over and not self._received and time.monotonic() - self._idle_since < _IDLE_S

    async def exchange_heads(self, request: h11.Request, body: bytes) -> h11.Response:
        """Send a request in one piece, and return the head of its answer."""
        events = (request, h11.Data(data=body), h11.EndOfMessage()) if body else (request, h11.EndOfMessage())
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))
        if not self._may_write.is_set():
            await self._wait_for(self._may_write)
        for _ in range(_MAX_HEADS):
            event = await self.receive_event()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse) or event.status_code == 101:
                break
        raise PeerLostError("the answer has no head")

    async def receive_event(self) -> object:
        """Return the next part of an answer."""
        self._num_events += 1
        if self._num_events % _EVENTS_A_TURN == 0:
            # an engine that cuts its answer into single bytes has them all here at once
            await asyncio.sleep(0)
        try:
            event = self._http.next_event()
            while event is h11.NEED_DATA:
                self._http.receive_data(await self._take_data())
                event = self._http.next_event()
        except h11.ProtocolError as exc:
            raise PeerLostError("the answer broke off") from exc
        return event

    async def _take_data(self) -> bytes:
        """Return the received bytes; b"" if the connection has ended."""
        while not self._received and not self._is_over:
            self._change.clear()
            await self._wait_for(self._change)
        data, self._received = bytes(self._received), bytearray()
        if not self._is_over and not self._transport.is_reading():
            self._transport.resume_reading()
        return data

    async def _wait_for(self, change: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(self._links.silence_s):
                await change.wait()
        except TimeoutError as exc:
            raise PeerLostError("the engine is silent") from exc

    def release(self) -> None:
        """Keep the connection where it can serve again, and cut it otherwise."""
        states = (self._http.our_state, self._http.their_state)
        if states != (h11.DONE, h11.DONE) or self._http.trailing_data[0] or self._received or self._is_over:
            self.abort()
            return
        self._http.start_next_cycle()
        self._idle_since = time.monotonic()
        self._links.keep_idle(self)

    def abort(self) -> None:
        """Cut the connection."""
        self._transport.abort()
