"""The live page of training runs and its routes: closed to whoever has no session, on loopback, without cookies."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from phalanx.serve.access.page_sessions import PageSessions
from phalanx.serve.access.refusals import App, Receive, RequestRefused, Scope, Send, send_refusal
from phalanx.serve.chat_page import ChatPage
from phalanx.watch.run_view import RunView

SESSION_ROUTE, CURVES_ROUTE, STREAM_ROUTE = "/session", "/curves", "/stream"
_READER = "watch"
_MAX_POINTS, _MAX_NAMES = 4000, 128
_STATE_PACE_S, _CURVES_PACE_S = 0.05, 0.2
"""Seconds for each open page between two states, and between two requests for curves."""
_MIN_STATE_S, _MIN_CURVES_S = 1.0, 2.0
MAX_ANSWERS_PER_S = 1 / _STATE_PACE_S + 1 / _CURVES_PACE_S
"""States and curves that all open pages together get in a second, once they are more than 20."""
_MAX_CACHED = 256
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_VENDORED = {b"/*uplot.css*/": "uPlot.min.css", b"/*uplot.js*/": "uPlot.iife.min.js"}


def build_page() -> bytes:
    """Return the page: one file, with the style and the script of uPlot in it, and nothing from elsewhere."""
    folder = files("phalanx.watch")
    page = folder.joinpath("watch_page.html").read_bytes()
    for mark, name in _VENDORED.items():
        page = page.replace(mark, folder.joinpath("vendor", name).read_bytes().strip())
    return page


class Snapshots:
    """What every open page is shown, made once a look and sent to all: viewers cost the run's files nothing.

    Guarantees:
        The more pages are open, the rarer each gets a state and asks for curves: all of them together are sent at most
        20 states a second, and ask for curves five times a second.
    """

    def __init__(self, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self._is_over, self._clock = is_over, clock
        self._text, self._number = b"event: state\ndata: {}\n\n", 0
        self._changed = asyncio.Event()
        self._num_viewers = 0

    def publish_state(self, state: dict[str, Any]) -> None:
        """Show a new state to every page."""
        pace = {"state_s": self._state_pace_s, "curves_s": max(_MIN_CURVES_S, _CURVES_PACE_S * self._num_viewers)}
        text = json.dumps({**state, "pace": pace}, allow_nan=False).encode()
        self._text, self._number = b"event: state\ndata: " + text + b"\n\n", self._number + 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def _state_pace_s(self) -> float:
        return max(_MIN_STATE_S, _STATE_PACE_S * self._num_viewers)

    async def stream_events(self) -> AsyncIterator[bytes]:
        """Yield the present state and later ones as server-sent events; a slow reader misses states in between."""
        shown, sent_s = -1, -math.inf
        self._num_viewers += 1
        try:
            while not self._is_over():
                pace_s = self._state_pace_s
                # looks are a second apart, or nearly so
                is_early = pace_s > _MIN_STATE_S and self._clock() - sent_s < pace_s - _MIN_STATE_S / 2
                if shown == self._number or is_early:
                    await self._changed.wait()
                    continue
                shown, sent_s = self._number, self._clock()
                yield self._text
        finally:
            self._num_viewers -= 1


class WatchPage:
    """The application.

    Args:
        views: The runs, in the order of the page.
        note_intruder: Is told of each refused request, by the class of the security event.
        is_over: Whether the server is about to end; open streams end then.

    Guarantees:
        Who has no session gets the same page of sign-in as everybody, and no word of a run. A link signs one browser
        in, once. No cookie: another site's request carries no right.
    """

    def __init__(
        self,
        views: Sequence[RunView],
        note_intruder: Callable[[str], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.snapshots, self.sessions = Snapshots(is_over), PageSessions()
        self._views, self._note_intruder = views, note_intruder
        self._cache: dict[tuple[object, ...], bytes] = {}
        routes = [
            Route(SESSION_ROUTE, self._open_session, methods=["POST"]),
            Route(CURVES_ROUTE, self._show_curves, methods=["GET"]),
            Route(STREAM_ROUTE, self._stream_states, methods=["GET"]),
        ]
        self.app: App = ChatPage(self._guard_app(Starlette(routes=routes)), page=build_page())

    def make_link(self, url: str) -> str:
        """Return an address that signs a browser in, once, within ten minutes."""
        return f"{url}/#link={self.sessions.make_link(_READER)}"

    def _guard_app(self, app: App) -> App:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            secret = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode(
                "latin-1"
            )
            reader = self.sessions.find_key(secret.removeprefix("Bearer ")) if secret.startswith("Bearer ") else None
            # a link opens a session and nothing else; it is used up whatever it was tried on
            if reader is None or (not reader[1]) != (scope["path"] == SESSION_ROUTE):
                self._note_intruder("wrong_token" if secret else "unexpected_reader")
                await send_refusal(
                    RequestRefused(401, "no_session", "Sign in with a link of phalanx watch."), scope, send
                )
                return
            await app(scope, receive, send)

        return guarded

    async def _open_session(self, request: Request) -> Response:
        del request
        return JSONResponse({"secret": self.sessions.open_session(_READER)}, headers=_HEADERS)

    async def _stream_states(self, request: Request) -> Response:
        del request
        headers = {**_HEADERS, "x-accel-buffering": "no"}
        return StreamingResponse(self.snapshots.stream_events(), media_type="text/event-stream", headers=headers)

    async def _show_curves(self, request: Request) -> Response:
        query = request.query_params
        try:
            number, max_points = int(query.get("run", "")), int(query.get("points", "800"))
            first, last = (None if query.get(name) is None else float(query[name]) for name in ("first", "last"))
            history = self._views[number].history if number >= 0 else None
        except (ValueError, IndexError):
            history = None
        names = [name for name in query.getlist("curve") if len(name) <= 200]
        if history is None or not 4 <= max_points <= _MAX_POINTS or not 1 <= len(names) <= _MAX_NAMES:
            return JSONResponse({"error": "unknown run, points or curve"}, 400, headers=_HEADERS)
        key = (number, id(history), history.num_rows, tuple(names), max_points, first, last)
        text = self._cache.get(key)
        if text is None:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            curves = history.decimate(names, max_points, first, last)
            text = self._cache[key] = json.dumps({"rows": history.num_rows, "curves": curves}, allow_nan=False).encode()
        return Response(text, media_type="application/json", headers=_HEADERS)
