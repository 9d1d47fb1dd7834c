"""Connections of the gateway to an engine, against servers that end, flood, stay silent or answer twice."""

import asyncio
import contextlib
import ssl

import pytest

from phalanx.errors import PeerGoneError, PeerLostError
from phalanx.serve.engine_links import EngineLinks

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
PARTS = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"


class RawEngine:
    """Sends the same bytes for each request and counts connections.

    Args:
        answers: Of each connection: bytes for each request; None closes the connection in place of an answer.
    """

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.answers: list[list[bytes | None]] = list(answers)
        self.requests: list[list[bytes]] = []
        self.rest, self.may_send_rest = b"", asyncio.Event()
        self.tasks: list[asyncio.Task[None] | None] = []

    async def serve(self, reader, writer):
        self.tasks.append(asyncio.current_task())
        with contextlib.closing(writer.transport):
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._answer(reader, writer)
            writer.transport.abort()

    async def _answer(self, reader, writer):
        answers = self.answers.pop(0)
        self.requests.append([])
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
            self.requests[-1].append(head + await reader.readexactly(length))
            answer = answers.pop(0)
            if answer is None:
                return
            writer.write(answer)
            await writer.drain()
            if not answers:
                await self.may_send_rest.wait()
                writer.write(self.rest)
                await writer.drain()
                if not self.rest:
                    return


async def ask(links: EngineLinks, body: bytes = b'{"n": 1}') -> bytes:
    reply = await links.send_request("POST", "/v1/x", [("content-type", "application/json")], body)
    try:
        return b"".join([piece async for piece in reply.read_pieces()])
    finally:
        reply.close()


async def await_stale_links(links: EngineLinks) -> None:
    async with asyncio.timeout(60):
        while links.has_usable_link:
            await asyncio.sleep(0)


def run_links(engine_of, use, silence_s: float = 30.0):
    """Run `use` on links to an engine; return its result and the engine."""

    async def run():
        engine = engine_of()
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        links = EngineLinks(
            f"http://127.0.0.1:{port}/base/", ssl.create_default_context(), {"x-own": "1"}, 5, silence_s
        )
        try:
            return await use(links), engine
        finally:
            links.close()
            server.close()
            for task in engine.tasks:
                task.cancel()
            await asyncio.gather(*engine.tasks, return_exceptions=True)

    return asyncio.run(run())


@pytest.mark.parametrize("answer", [WHOLE, PARTS])
def test_a_connection_serves_again_after_a_whole_answer(answer):
    async def use(links):
        return [await ask(links) for _ in range(3)]

    bodies, engine = run_links(lambda: RawEngine([answer] * 3), use)

    assert bodies == [b"{}"] * 3
    assert [len(requests) for requests in engine.requests] == [3]
    head = engine.requests[0][0]
    assert head.startswith(b"POST /base/v1/x HTTP/1.1\r\n")
    assert head.lower().count(b"content-length: 8\r\n") == head.lower().count(b"x-own: 1\r\n") == 1


@pytest.mark.parametrize("behind", [WHOLE, b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"])
@pytest.mark.parametrize("is_late", [False, True])
def test_bytes_behind_an_answer_are_no_part_of_the_next_one(behind, is_late):
    engine = RawEngine([WHOLE if is_late else WHOLE + behind], [WHOLE.replace(b"{}", b"[]")])
    engine.rest = behind if is_late else b""

    async def use(links):
        first = await ask(links)
        engine.may_send_rest.set()
        if is_late:
            await await_stale_links(links)
        return first, await ask(links)

    bodies, _ = run_links(lambda: engine, use)

    assert bodies == (b"{}", b"[]")
    assert [len(requests) for requests in engine.requests] == [1, 1]


def test_a_connection_that_the_engine_has_closed_is_not_used_again():
    engine = RawEngine([WHOLE], [WHOLE])
    engine.may_send_rest.set()

    async def use(links):
        first = await ask(links)
        await await_stale_links(links)
        return first, await ask(links)

    bodies, _ = run_links(lambda: engine, use)

    assert bodies == (b"{}", b"{}")


@pytest.mark.parametrize(
    "answer",
    [
        None,
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 16 + WHOLE,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        b"SSH-2.0-x\r\n\r\n",
    ],
)
def test_an_answer_that_is_none_is_a_lost_engine_and_its_connection_is_cut(answer):
    engine = RawEngine([answer, None], [WHOLE])

    async def use(links):
        with pytest.raises(PeerLostError):
            await ask(links)
        return await ask(links)

    # an engine that goes on waiting is cut by the silence
    body, _ = run_links(lambda: engine, use, silence_s=0.2)

    assert body == b"{}"
    assert [len(requests) for requests in engine.requests] == [1, 1]


def test_no_listener_is_an_engine_that_has_surely_not_begun():
    async def run():
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        links = EngineLinks(f"http://127.0.0.1:{port}", ssl.create_default_context(), {}, 5, 5)
        await links.send_request("GET", "/v1/models", (), b"")

    with pytest.raises(PeerGoneError):
        asyncio.run(run())


def test_a_flood_waits_outside_until_it_is_read():
    """An engine that sends faster than clients read fills no memory of the gateway."""
    total = 32 * 1024 * 1024
    engine = RawEngine([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total + b"x" * total])

    async def use(links):
        reply = await links.send_request("GET", "/v1/x", (), b"")
        sizes = []
        async for piece in reply.read_pieces():
            sizes.append(len(piece))
            # gives the engine time to send much more than is asked for
            for _ in range(5):
                await asyncio.sleep(0)
        return sizes

    sizes, _ = run_links(lambda: engine, use)

    assert sum(sizes) == total
    assert max(sizes) <= 1024 * 1024


def test_an_answer_in_single_bytes_leaves_turns_to_others():
    """A hundred thousand of them are received at once, and the loop of the gateway did nothing else until their end."""
    count = 10_000
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    engine = RawEngine([head + b"1\r\nx\r\n" * count + b"0\r\n\r\n"])

    async def use(links):
        turns = 0

        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        reply = await links.send_request("GET", "/v1/x", (), b"")
        beside = asyncio.create_task(others())
        body = b"".join([piece async for piece in reply.read_pieces()])
        beside.cancel()
        return body, turns

    (body, turns), _ = run_links(lambda: engine, use)

    assert body == b"x" * count
    assert turns >= count // 64 - 2


def test_a_header_cannot_smuggle_another_one():
    async def use(links):
        await links.send_request("POST", "/v1/x", [("x", "a\r\ny: b")], b"{}")

    with pytest.raises(PeerLostError):
        run_links(lambda: RawEngine([WHOLE]), use)
