"""An engine that writes nothing but speaks its routes, so that a gateway before it is measured alone.

``python -m phalanx.lab.bench.serving.stub_engine HOLD`` prints its address. The texts of streams end when HOLD of them
are open at the same time; 0 lets each end at once.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from phalanx.child import die_with_parent
from phalanx.serve.access import ListenConfig, RequestBounds, bind_socket, make_server

NUM_PIECES = 8
_USAGE = {"prompt_tokens": 4, "completion_tokens": NUM_PIECES, "total_tokens": 4 + NUM_PIECES}


class StubEngine:
    """Answers each chat with the same words.

    Args:
        hold: Streams that must be open before any of them ends.
    """

    def __init__(self, hold: int) -> None:
        self._hold, self._num_open, self._is_full = hold, 0, asyncio.Event()

    def make_app(self) -> Starlette:
        """Return its routes."""
        return Starlette(
            routes=[
                Route("/v1/models", self._list_models),
                Route("/v1/chat/completions", self._answer_chat, methods=["POST"]),
            ]
        )

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def _answer_chat(self, request: Request) -> Response:
        body = await request.json()
        if body.get("stream"):
            return StreamingResponse(self._write_pieces(), media_type="text/event-stream")
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "word " * NUM_PIECES},
            "finish_reason": "stop",
        }
        return JSONResponse({**_head("chat.completion"), "choices": [choice], "usage": _USAGE})

    async def _write_pieces(self) -> AsyncIterator[str]:
        for number in range(NUM_PIECES):
            choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
            yield _event({**_head("chat.completion.chunk"), "choices": [choice]})
            if number == 0 and self._hold:
                self._num_open += 1
                if self._num_open >= self._hold:
                    self._is_full.set()
                await self._is_full.wait()
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        yield _event({**_head("chat.completion.chunk"), "choices": [last]})
        yield _event({**_head("chat.completion.chunk"), "choices": [], "usage": _USAGE})
        yield "data: [DONE]\n\n"


def _head(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1_700_000_000, "model": "stub"}


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


async def _serve_stub(hold: int) -> None:
    listen = ListenConfig(port=0)
    bounds = RequestBounds(max_connections=10_000, max_connections_per_address=10_000)
    with contextlib.closing(bind_socket(listen)) as sock:
        server = make_server(StubEngine(hold).make_app(), listen, bounds, 1)
        sys.stdout.write(f"http://127.0.0.1:{sock.getsockname()[1]}\n")
        sys.stdout.flush()
        await server.serve(sockets=[sock])


if __name__ == "__main__":
    die_with_parent()
    asyncio.run(_serve_stub(int(sys.argv[1])))
