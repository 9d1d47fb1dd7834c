"""The routes of the server: one table, in which every protocol is a body and a writer."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import anyio
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from phalanx.config import StrictModel
from phalanx.errors import PhalanxError
from phalanx.serve.access import (
    AnswerCutError,
    Caller,
    KeyGuard,
    RequestBounds,
    RequestFacts,
    RequestRefused,
    error_body,
)
from phalanx.serve.access.event_padding import EventPadder, wants_padding
from phalanx.serve.access.refusals import App, route_of
from phalanx.serve.api.chat import ChatBody, ChatReplyWriter
from phalanx.serve.api.completions import CompletionBody, CompletionWriter
from phalanx.serve.api.embeddings import EmbeddingBody
from phalanx.serve.api.fields import make_id, parse_body, translate_body
from phalanx.serve.api.messages import CountBody, MessagesBody, MessagesWriter
from phalanx.serve.api.openapi import describe_routes
from phalanx.serve.api.responses import ResponsesBody, ResponsesWriter
from phalanx.serve.api.service import LEFT, ModelReply, Service, refusal_of
from phalanx.serve.engine import ModelCard, SamplingSettings
from phalanx.serve.engine.text_assembler import TokenNames
from phalanx.serve.observe import ServerWatch

_log = logging.getLogger(__name__)
_FAILED = 500
SESSION_ROUTE, SESSION_END_ROUTE = "/chat/session", "/chat/session/end"
_EVENT_STREAM = {"cache-control": "no-store", "x-accel-buffering": "no"}


class ReplyWriter(Protocol):
    """Writes a reply in the form of one protocol."""

    async def write_whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        ...

    def write_stream(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events."""
        ...


@dataclass(frozen=True)
class GenerationRoute:
    """A protocol that writes texts: its path, its body, and how its answers are written."""

    path: str
    body: type[ChatBody | CompletionBody | MessagesBody | ResponsesBody]
    writer: Callable[[Any, ModelReply, TokenNames], ReplyWriter]


GENERATION_ROUTES = (
    GenerationRoute("/v1/chat/completions", ChatBody, ChatReplyWriter),
    GenerationRoute("/v1/completions", CompletionBody, CompletionWriter),
    GenerationRoute("/v1/messages", MessagesBody, MessagesWriter),
    GenerationRoute("/v1/responses", ResponsesBody, ResponsesWriter),
)


class SessionBody(StrictModel):
    """The body of a request for a session: it has no fields."""


_READS = {
    "/v1/models": "The models that the key may use.",
    "/v1/models/{model_id}": "One model.",
    "/health/live": "The process runs.",
    "/health/ready": "Requests are taken.",
}


class _Routes:
    """The endpoints."""

    def __init__(self, service: Service, is_ready: Callable[[], bool]) -> None:
        self._service, self._is_ready = service, is_ready

    def generate_by(self, route: GenerationRoute) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of a protocol."""

        async def generate(request: Request) -> Response:
            caller = _caller_of(request)
            with ExitStack() as stack:
                reservation = stack.enter_context(self._service.begin_request(caller))
                body = parse_body(route.body, await request.body())
                generations = translate_body(lambda: body.translate(caller))
                opened = await _unless_left(
                    request, lambda: self._service.open_reply(generations, caller, route.path, reservation)
                )
                if not isinstance(opened, ModelReply):
                    return Response(status_code=LEFT)
                # the reply settles it
                stack.pop_all()
            request.scope["state"]["models"] += self._service.pool.digests_of(opened.card)
            names = self._service.pool.find_engine(opened.card.id).served.token_names
            writer = route.writer(body, opened, names)
            headers = {"x-request-id": make_id("req_")}
            if body.is_streamed:
                options = getattr(body, "stream_options", None)
                wish = None if options is None else options.include_obfuscation
                padder = EventPadder() if wants_padding(wish, request.url.scheme) else None
                return _ReplyStream(_guard_stream(writer, opened, route.path, padder), opened, headers | _EVENT_STREAM)
            try:
                whole = await _unless_left(request, writer.write_whole)
                if not request.state.is_open():
                    opened.status = LEFT
            except PhalanxError as exc:
                refusal = _end_by_fault(opened, route.path, exc)
                return _answer_refusal(request, refusal)
            finally:
                await opened.close()
            return Response(status_code=LEFT) if whole is None else JSONResponse(whole, headers=headers)

        return generate

    async def embed(self, request: Request) -> Response:
        """Answer with vectors."""
        caller = _caller_of(request)
        with self._service.begin_request(caller) as reservation:
            body = parse_body(EmbeddingBody, await request.body())
            embedded = await _unless_left(
                request,
                lambda: self._service.embed_texts(
                    body.model, body.texts(), caller, "/v1/embeddings", reservation, request.state.is_open
                ),
            )
        return Response(status_code=LEFT) if embedded is None else JSONResponse(body.describe(*embedded))

    async def count_tokens(self, request: Request) -> Response:
        """Answer with the number of tokens of a chat."""
        caller = _caller_of(request)
        with self._service.begin_request(caller):
            body = parse_body(CountBody, await request.body())
            generation = translate_body(lambda: body.make_request(caller, 1, (), SamplingSettings()))
            num_tokens = await self._service.count_tokens(generation, caller, "/v1/messages/count_tokens")
        return JSONResponse({"input_tokens": num_tokens})

    async def open_session(self, request: Request) -> Response:
        """Answer with a secret that the chat page keeps instead of the key, and with the actions of the filters."""
        parse_body(SessionBody, await request.body())
        caller, access = _caller_of(request), self._service.access
        if caller.session:
            raise RequestRefused(403, "session", "A session opens no further session; sign in with a key.")
        facts = RequestFacts(route=SESSION_ROUTE, model_digest="", status=200)
        access.request_log.record_request(caller, facts)
        session = {
            "secret": access.key_store.sessions.open_session(caller.key_id),
            "owner": caller.owner,
            "filters": self._service.filters.describe_actions(),
        }
        return JSONResponse(session, headers={"cache-control": "no-store"})

    async def end_session(self, request: Request) -> Response:
        """End the session that asks; answers that are being sent to it end too."""
        parse_body(SessionBody, await request.body())
        caller, access = _caller_of(request), self._service.access
        if not caller.session:
            raise RequestRefused(403, "session", "Only a session ends itself; a key is revoked by phalanx keys.")
        facts = RequestFacts(route=SESSION_END_ROUTE, model_digest="", status=200)
        access.request_log.record_request(caller, facts)
        return _LastAnswer(lambda: access.key_store.sessions.end_session(caller.session))

    async def list_models(self, request: Request) -> Response:
        """Answer with the models that the key may use, in a form that clients of both protocols read."""
        cards = self._service.cards_for(_caller_of(request))
        ids = {"first_id": cards[0].id, "last_id": cards[-1].id} if cards else {"first_id": None, "last_id": None}
        is_anthropic = "anthropic-version" in request.headers
        data = [_describe_card(card, is_anthropic) for card in cards]
        return JSONResponse({"object": "list", "data": data, "has_more": False, **ids})

    async def show_model(self, request: Request) -> Response:
        """Answer with one model."""
        try:
            card = self._service.find_card(request.path_params["model_id"], _caller_of(request))
        except PhalanxError as exc:
            raise refusal_of(exc) from exc
        return JSONResponse(_describe_card(card, "anthropic-version" in request.headers))

    async def refuse(self, request: Request, exc: Exception) -> Response:
        """Answer with a refusal, or that there is no such path or method; the log has it too."""
        if isinstance(exc, AnswerCutError):
            # the door cuts what it does not let out; the line of what was written is the reply's
            return Response(status_code=LEFT)
        route = route_of(request.scope)
        if isinstance(exc, HTTPException):
            code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code, "invalid_request")
            exc = RequestRefused(exc.status_code, code, "There is no such route, or it has another method.")
        if not isinstance(exc, RequestRefused):
            _log.error("%s: %s", route, type(exc).__name__)
            exc = RequestRefused(
                _FAILED, "server_error", "The server failed; its operator finds the reason in its log."
            )
        _log_reason(route, exc, exc.__cause__)
        facts = RequestFacts(route=route, model_digest="", status=exc.status, verdicts=[exc.code])
        self._service.access.request_log.record_request(_caller_of(request), facts)
        return _answer_refusal(request, exc)

    async def show_openapi(self, _request: Request) -> Response:
        """Answer with the description of all routes."""
        bodies: dict[str, type[BaseModel]] = {route.path: route.body for route in GENERATION_ROUTES}
        bodies |= {"/v1/messages/count_tokens": CountBody, "/v1/embeddings": EmbeddingBody, SESSION_ROUTE: SessionBody}
        bodies[SESSION_END_ROUTE] = SessionBody
        return JSONResponse(describe_routes(bodies, _READS))

    async def show_root(self, _request: Request) -> Response:
        """Answer a client's probe."""
        return Response(status_code=200)

    async def show_live(self, _request: Request) -> Response:
        """Answer that the process runs."""
        return JSONResponse({"status": "live"})

    async def show_ready(self, _request: Request) -> Response:
        """Answer whether requests are taken."""
        is_ready = self._is_ready()
        return JSONResponse({"status": "ready" if is_ready else "draining"}, status_code=200 if is_ready else 503)


def _describe_card(card: ModelCard, is_anthropic: bool) -> dict[str, Any]:
    if is_anthropic:
        created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
        return {"id": card.id, "type": "model", "display_name": card.id, "created_at": created}
    described = {"id": card.id, "object": "model", "created": card.created, "owned_by": "phalanx"}
    return {**described, "digest": card.digest, "window": card.window, "base": card.base}


def _caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["state"]["caller"]
    return caller


async def _unless_left(request: Request, work: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of some work, or None once the client has left, which cancels it."""
    results: list[Any] = []
    faults: list[Exception] = []

    async with anyio.create_task_group() as group:

        async def run() -> None:
            try:
                results.append(await work())
            except (PhalanxError, RequestRefused) as exc:
                faults.append(exc)
            group.cancel_scope.cancel()

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(run)
        group.start_soon(watch)
    if faults:
        raise faults[0]
    return results[0] if results else None


class _LastAnswer(JSONResponse):
    """What a session gets as its last answer, whether or not the client takes it; the door lets no further one out."""

    def __init__(self, end_session: Callable[[], None]) -> None:
        super().__init__({"status": "ended"})
        self._end_session = end_session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end_session()


class _ReplyStream(StreamingResponse):
    """The events of an answer; the reply is closed however the response ends, also before its first event."""

    def __init__(self, events: AsyncGenerator[str, None], reply: ModelReply, headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._reply.close()


def _log_reason(route: str, refusal: RequestRefused, reason: BaseException | None) -> None:
    """Log why the server failed; a message to a client about its own request may quote its text."""
    if refusal.status == _FAILED and isinstance(reason, PhalanxError):
        _log.error("%s: %s", route, reason)


def _end_by_fault(reply: ModelReply, path: str, fault: PhalanxError) -> RequestRefused:
    """Return what the client is told in the place of the rest of a reply; the line of the reply has it as well."""
    refusal = refusal_of(fault)
    _log_reason(path, refusal, fault)
    reply.fail(refusal)
    return refusal


def _answer_refusal(request: Request, refusal: RequestRefused) -> Response:
    headers = {name.decode(): value.decode() for name, value in refusal.headers()}
    return Response(refusal.body(request.url.path), refusal.status, headers)


async def _guard_stream(
    writer: ReplyWriter, reply: ModelReply, path: str, padder: EventPadder | None
) -> AsyncGenerator[str, None]:
    """Yield the events of an answer; what goes wrong becomes an event."""
    try:
        async for event in writer.write_stream():
            yield event if padder is None else padder.pad_event(event)
    except PhalanxError as exc:
        refusal = _end_by_fault(reply, path, exc)
        body = error_body(path, refusal.status, refusal.message, refusal.code).decode()
        yield f"event: error\ndata: {body}\n\n"


def make_app(
    service: Service,
    bounds: RequestBounds,
    *,
    is_ready: Callable[[], bool],
    lifespan: Callable[[], AbstractAsyncContextManager[None]],
    watch: ServerWatch | None = None,
) -> App:
    """Return the application behind its one door: no route answers without a valid key.

    Args:
        is_ready: Whether new requests are taken.
        lifespan: Runs as long as the server does.
        watch: Sees every request, refused ones included, and has the route of the metrics.
    """
    routes = _Routes(service, is_ready)

    @asynccontextmanager
    async def run_lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with lifespan():
            yield

    app = Starlette(
        routes=[
            *(Route(route.path, routes.generate_by(route), methods=["POST"]) for route in GENERATION_ROUTES),
            Route("/v1/messages/count_tokens", routes.count_tokens, methods=["POST"]),
            Route("/v1/embeddings", routes.embed, methods=["POST"]),
            Route(SESSION_ROUTE, routes.open_session, methods=["POST"]),
            Route(SESSION_END_ROUTE, routes.end_session, methods=["POST"]),
            Route("/v1/models", routes.list_models, methods=["GET"]),
            Route("/v1/models/{model_id:path}", routes.show_model, methods=["GET"]),
            Route("/health/live", routes.show_live, methods=["GET"]),
            Route("/health/ready", routes.show_ready, methods=["GET"]),
            Route("/openapi.json", routes.show_openapi, methods=["GET"]),
            Route("/", routes.show_root, methods=["GET"]),
            *([] if watch is None else [watch.route]),
        ],
        exception_handlers={kind: routes.refuse for kind in (RequestRefused, HTTPException, Exception)},
        lifespan=run_lifespan,
    )
    app.router.redirect_slashes = False
    access = service.access
    guarded = KeyGuard(app, access.key_store, bounds, access.request_log.count_refusal)
    return guarded if watch is None else watch.wrap_app(guarded)
