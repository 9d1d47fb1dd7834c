"""The gateway: keys, bounds, budgets, filters and log before any engine that speaks the routes of OpenAI."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route as StarletteRoute

from phalanx.errors import ConfigError, DiskError
from phalanx.security.crypto import Peer
from phalanx.serve.access import (
    Access,
    BudgetExceeded,
    Caller,
    KeyGuard,
    RequestFacts,
    RequestLog,
    RequestRefused,
    RequestTexts,
    Reservation,
    bind_socket,
    make_server,
    model_quarantined,
    run_announced,
)
from phalanx.serve.access.event_padding import EventPadder, wants_padding
from phalanx.serve.access.refusals import App, route_of
from phalanx.serve.access.request_bounds import run_aside
from phalanx.serve.access.request_notes import note_budget, note_prompts
from phalanx.serve.filters import TextFilters
from phalanx.serve.gateway.answers import LEFT, AnswerFacts, check_status, clean_answer, read_whole
from phalanx.serve.gateway.backends import BackendPool, RemoteEngine
from phalanx.serve.gateway.config import GatewayConfig
from phalanx.serve.gateway.requests import ROUTES, ForwardedRequest, Route, read_request
from phalanx.serve.gateway.streams import AnswerStream, stream_whole_answer
from phalanx.serve.observe import Gauge, ServerWatch, WatchedServer

_log = logging.getLogger(__name__)
_SSE = "text/event-stream"
_FREE = frozenset({"model_not_found", "sensitive_text", "no_engine", "engine_refused", "context_length_exceeded"})
"""Refusals after which surely no engine has worked for a request."""


class Gateway:
    """Routes of a gateway, without the door; `make_gateway` puts both together."""

    def __init__(self, config: GatewayConfig, access: Access, filters: TextFilters, pool: BackendPool) -> None:
        self._config, self._access, self._filters, self._pool = config, access, filters, pool

    def make_app(self, watch: ServerWatch) -> Starlette:
        """Return the routes as an application; a path that is not among them is 404."""
        forwarded = [
            StarletteRoute(route.path, self._make_endpoint(route), methods=["POST"], name=route.name)
            for route in ROUTES
        ]
        own = [
            StarletteRoute("/v1/models", self._list_models, methods=["GET"]),
            StarletteRoute("/v1/models/{name:path}", self._show_model, methods=["GET"]),
            StarletteRoute("/health", self._report_health, methods=["GET"]),
            watch.route,
        ]

        @contextlib.asynccontextmanager
        async def run_beside(_app: Starlette) -> AsyncIterator[None]:
            async with self._run_upkeep(), watch.run_checks():
                yield

        app = Starlette(routes=[*forwarded, *own], exception_handlers=_HANDLERS, lifespan=run_beside)
        app.router.redirect_slashes = False
        return app

    @contextlib.asynccontextmanager
    async def _run_upkeep(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self._access.keep_synced()),
            asyncio.create_task(self._pool.watch_health(self._config.health_every_s)),
        ]
        for task in tasks:
            task.add_done_callback(_stop_after_fault)
        self._access.request_log.record_event("started", {"models": len(self._pool.model_names())})
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._access.request_log.record_event("stopped", {})
            self._pool.close()

    async def _list_models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._models_of(request.state.caller)})

    async def _show_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        models = [model for model in self._models_of(request.state.caller) if model["id"] == name]
        if not models:
            raise _no_model()
        return JSONResponse(models[0])

    def _models_of(self, caller: Caller) -> list[dict[str, Any]]:
        names = [name for name in self._pool.model_names() if caller.allows_model(name)]
        return [{"id": name, "object": "model", "created": 0, "owned_by": "phalanx"} for name in names]

    async def _report_health(self, _request: Request) -> Response:
        is_ready = any(backend.is_healthy for backend in self._pool.backends)
        return JSONResponse({"status": "ready" if is_ready else "no engine"}, 200 if is_ready else 503)

    def _make_endpoint(self, route: Route) -> Any:
        async def answer_request(request: Request) -> Response:
            caller: Caller = request.state.caller
            with contextlib.ExitStack() as stack:
                try:
                    reservation = stack.enter_context(self._access.budgets.begin(caller))
                    forwarded = await self._read_request(route, await request.body(), caller)
                    reservation.reserve_tokens(forwarded.max_prompt_tokens, forwarded.max_completion_tokens)
                except (RequestRefused, BudgetExceeded) as exc:
                    refusal = exc if isinstance(exc, RequestRefused) else _refuse_budget(exc)
                    verdicts = (f"{refusal.param}: refused",) if refusal.code == "text_refused" else (refusal.code,)
                    facts = RequestFacts(route.path, "", refusal.status, verdicts=verdicts)
                    self._access.request_log.record_request(caller, facts)
                    raise refusal from None
                # the entry settles it
                stack.pop_all()
            request.state.models.append((forwarded.model, ""))
            entry = _Entry(self._access.request_log, caller, forwarded, reservation)
            padder = EventPadder() if wants_padding(forwarded.wants_padding, request.url.scheme) else None
            return await self._forward(entry, request, forwarded, padder)

        return answer_request

    async def _read_request(self, route: Route, body: bytes, caller: Caller) -> ForwardedRequest:
        def read() -> ForwardedRequest:
            forwarded = read_request(route, body, caller.owner, self._config.limits, self._filters)
            note_prompts(forwarded.prompt_words(), has_logprobs=forwarded.has_scores)
            return forwarded

        forwarded = await run_aside(len(body), read)
        if not caller.allows_model(forwarded.model):
            raise _no_model()
        if not self._access.key_store.allows_models([(forwarded.model, "")]):
            raise model_quarantined()
        return forwarded

    async def _forward(
        self, entry: "_Entry", request: Request, forwarded: ForwardedRequest, padder: EventPadder | None
    ) -> Response:
        """Send a request to an engine and return its answer; the entry is closed once, however this ends."""
        limits = self._config.limits
        max_bytes, max_s = limits.max_answer_bytes, limits.max_answer_s
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(entry)
            try:
                backend, answer = await stack.enter_async_context(self._pool.open_answer(forwarded))
                entry.backend = backend
                await check_status(answer, forwarded, max_bytes, max_s)
                if forwarded.is_stream and not forwarded.is_collected:
                    relay = AnswerStream(forwarded, self._filters, entry.facts, limits, padder)
                    # what is open ends with the stream
                    return _ClosingStream(relay.relay(answer, entry.finish), stack.pop_all())
                content = await read_whole(answer, max_bytes, max_s)
                whole = await run_aside(
                    len(content), lambda: clean_answer(content, forwarded, self._filters, entry.facts)
                )
                entry.facts.status = 200 if request.state.is_open() and not await request.is_disconnected() else LEFT
            except RequestRefused as refusal:
                entry.refusal = refusal
                raise
        if forwarded.is_collected:
            events = b"".join(stream_whole_answer(whole, forwarded))
            return Response(events, media_type=_SSE)
        return JSONResponse(whole)


class _Entry(contextlib.AbstractContextManager["_Entry"]):
    """The end of one forwarded request: its budget is settled and its line written, once."""

    def __init__(
        self, request_log: RequestLog, caller: Caller, forwarded: ForwardedRequest, reservation: Reservation
    ) -> None:
        self._request_log, self._caller, self._forwarded = request_log, caller, forwarded
        self._reservation = reservation
        self._is_finished = False
        answers: dict[object, list[str]] | None = {} if request_log.seals_texts else None
        self.facts = AnswerFacts(verdicts=dict.fromkeys(forwarded.notes), answers=answers)
        self.backend: RemoteEngine | None = None
        self.refusal: RequestRefused | None = None

    def __exit__(self, *error: object) -> None:
        self.finish()

    def finish(self) -> None:
        """Settle the budget and write the line; a second call does nothing."""
        if self._is_finished:
            return
        self._is_finished = True
        facts, entry = self.facts, self._reservation.entry
        if self.refusal is not None and self.refusal.code in _FREE:
            self._reservation.settle(0, 0)
        else:
            # an engine's counts are claims: they lower what was reserved, and cannot use up a key's budget; that of an
            # answer which does not end is of its beginning alone, and a client chooses when to leave
            completion = facts.completion_tokens if facts.has_ended else None
            self._reservation.settle(
                entry.prompt if facts.prompt_tokens is None else min(facts.prompt_tokens, entry.prompt),
                entry.completion if completion is None else min(completion, entry.completion),
            )
        sizes = {"prompt_tokens": facts.prompt_tokens, "completion_tokens": facts.completion_tokens}
        # a name that is none of a model is a text of the client
        has_model = self.refusal is None or self.refusal.code != "model_not_found"
        model = self._forwarded.model if has_model else "unknown"
        self._request_log.record_request(
            self._caller,
            RequestFacts(
                route=self._forwarded.route.path,
                model_digest=f"{model} at {self.backend.config.name if self.backend else 'no engine'}",
                status=self.refusal.status if self.refusal else facts.status,
                sizes={**{name: count for name, count in sizes.items() if count is not None}, "bytes": facts.num_bytes},
                verdicts=tuple(facts.verdicts),
                mark=", ".join(dict.fromkeys(facts.marks)),
                texts=None
                if facts.answers is None
                else RequestTexts([self._forwarded.prompts], list(map("".join, facts.answers.values()))),
            ),
        )


class _ClosingStream(StreamingResponse):
    """A streamed answer that gives back its connection and budget when it ends, also where its client has left."""

    def __init__(self, content: AsyncIterator[bytes], stack: contextlib.AsyncExitStack) -> None:
        super().__init__(content, media_type=_SSE, headers={"cache-control": "no-store"})
        self._content, self._stack = content, stack

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if hasattr(self._content, "aclose"):
                await self._content.aclose()
            await self._stack.aclose()


def _stop_after_fault(task: asyncio.Task[None]) -> None:
    """Stop a gateway that cannot keep its counts and lines: it would answer what nobody can account for."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("the gateway stops: %s", task.exception())
        signal.raise_signal(signal.SIGTERM)


def _refuse_budget(exc: BudgetExceeded) -> RequestRefused:
    note_budget(exc.limit)
    message = f"The budget {exc.limit} of this key is used up."
    return RequestRefused(429, "budget_exceeded", message, retry_after_s=exc.retry_after_s)


def _no_model() -> RequestRefused:
    # the same for a model that a key may not use: a key learns of no other models
    return RequestRefused(404, "model_not_found", "There is no such model on this route.", param="model")


async def _answer_refusal(request: Request, exc: Exception) -> Response:
    if not isinstance(exc, RequestRefused):
        _log.error("%s: the disk takes no more counts or lines: %s", route_of(request.scope), exc)
        exc = RequestRefused(503, "unavailable", "The gateway cannot record requests at present.")
    headers = {name.decode("ascii"): value.decode("ascii") for name, value in exc.headers()}
    return Response(exc.body(request.url.path), exc.status, headers)


async def _answer_unknown(request: Request, exc: Exception) -> Response:
    status = getattr(exc, "status_code", 500)
    code, message = _UNKNOWN.get(status, ("internal_error", "The gateway failed."))
    return await _answer_refusal(request, RequestRefused(status, code, message))


_UNKNOWN = {404: ("no_route", "There is no such route."), 405: ("no_route", "This method is not allowed here.")}
_HANDLERS: Any = {
    RequestRefused: _answer_refusal,
    DiskError: _answer_refusal,
    404: _answer_unknown,
    405: _answer_unknown,
    Exception: _answer_unknown,
}


def make_gateway(config: GatewayConfig, access: Access) -> App:
    """Return the whole gateway as one application, door included.

    Raises:
        CertificateError: The file of an engine's key cannot be read.
        ConfigError: The authority of an engine cannot be read.
        DataError: A list of a filter cannot be read.
    """
    pool = BackendPool([RemoteEngine(backend, config.limits.max_answer_s) for backend in config.backends])
    gateway = Gateway(config, access, TextFilters(config.filters), pool)
    watch = ServerWatch(config.watch, _describe_engines(config, pool), access.request_log)
    app = gateway.make_app(watch)
    return watch.wrap_app(KeyGuard(app, access.key_store, config.bounds, access.request_log.count_refusal))


def _describe_engines(config: GatewayConfig, pool: BackendPool) -> WatchedServer:
    if config.watch.alerts.reference.texts is not None:
        raise ConfigError("watch.alerts.reference.texts: a gateway measures no perplexity; remove the key")
    names = [backend.config.name for backend in pool.backends]
    models = {f"{model} at {name}": model for model in pool.model_names() for name in [*names, "no engine"]}
    running = Gauge(
        "phalanx_running_requests",
        "Requests that an engine answers.",
        ("engine",),
        lambda: {(backend.config.name,): float(backend.num_open) for backend in pool.backends},
    )
    health = Gauge(
        "phalanx_engine_up",
        "1 for each engine that answers.",
        ("engine",),
        lambda: {(backend.config.name,): float(backend.is_healthy) for backend in pool.backends},
    )
    digests = dict.fromkeys(pool.model_names(), "")
    return WatchedServer(config.access, lambda: models, lambda: digests, (running, health))


def run_gateway(config: GatewayConfig, announce: Any = lambda address: None) -> None:
    """Serve until the process is told to stop; requests that are being answered may end.

    Args:
        announce: Is told the address once connections are accepted.

    Raises:
        ConfigError: The address or a certificate cannot be had.
        KeyFileError, AuditLogError, DiskError, InputError, CertificateError: As `Access.open`.
    """
    operator = None if config.operator is None else Peer.from_hex("operator", config.operator)
    with Access.open(config.access, operator, config.seal_texts) as access:
        server = make_server(make_gateway(config, access), config.listen, config.bounds, config.drain_s)
        with contextlib.closing(bind_socket(config.listen)) as sock:
            scheme = "http" if config.listen.certificate is None else "https"
            host, port = sock.getsockname()[:2]
            address = f"[{host}]" if ":" in host else host
            run_announced(server, sock, lambda: announce(f"{scheme}://{address}:{port}"))
