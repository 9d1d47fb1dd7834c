"""The one door of a server: no request reaches an application without a valid key and within its bounds."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.access_gate import check_caller
from phalanx.errors import VerificationError
from phalanx.serve.access.key_store import Caller, KeyStore
from phalanx.serve.access.refusals import App, Message, Receive, RequestRefused, Scope, Send, send_refusal
from phalanx.serve.access.request_bounds import RequestBounds, body_too_large, check_body, check_head

_POLICY_VIOLATION = 1008


class AnswerCutError(Exception):
    """The rest of an answer is not sent: its key or model is out of service now, or its client takes nothing."""


class KeyGuard:
    """ASGI middleware before every route, so that a route that nobody thought of is closed as well.

    The application finds the caller in ``scope["state"]["caller"]`` and gets the whole body in one message. It puts the
    ids and digests of the models that answer into ``scope["state"]["models"]``; ``scope["state"]["is_open"]`` says
    whether the caller may still be answered.

    Args:
        app: The guarded application, which sees no request without a key.
        on_refusal: Is told the client address of each request without a valid key.

    Guarantees:
        Every path, method and kind of connection without a valid key is answered 401, by the same bytes for a path
        that exists and one that does not; no byte of its body is read. An answer that is being sent ends when its
        key is revoked, expires or is quarantined, when its session of the chat page ends, and when a model that writes
        it is quarantined. A key has at most as many bodies that are read as its concurrency. Lifespan events pass.
    """

    def __init__(
        self,
        app: App,
        key_store: KeyStore,
        bounds: RequestBounds | None = None,
        on_refusal: Callable[[str], None] = lambda address: None,
    ) -> None:
        self._app, self._key_store, self._bounds = app, key_store, bounds or RequestBounds()
        self._on_refusal = on_refusal
        self._num_readers: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one connection as ASGI wants it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        caller = self._find_caller(scope)
        if scope["type"] == "websocket":
            is_admitted = caller is not None and _has_role(scope, caller)
            await (self._app(scope, receive, send) if is_admitted else _refuse_websocket(scope, receive, send))
        elif scope["type"] == "http":
            await self._answer_request(caller, scope, receive, send)

    def _find_caller(self, scope: Scope) -> Caller | None:
        client: Any = scope.get("client")
        address = str(client[0]) if client else ""
        secret = _read_secret(scope["headers"])
        # a request without a key costs the same look-up as one with a wrong key
        caller = self._key_store.find_caller(secret or "", address)
        if caller is None:
            self._on_refusal(address)
        return caller

    async def _answer_request(self, caller: Caller | None, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(send, self._bounds.send_timeout_s)
        try:
            if caller is None:
                raise _invalid_key()
            if not _has_role(scope, caller):
                raise _role_missing()
            length = check_head(scope, self._bounds)
            with self._count_reader(caller):
                body = await self._read_body(receive, length)
            check_body(body, scope, self._bounds)
        except RequestRefused as refusal:
            await send_refusal(refusal, scope, send)
            return
        except AnswerCutError:
            return
        store, models = self._key_store, list[tuple[str, str]]()
        answer.is_allowed = lambda: store.is_admitted(caller, models)
        state = {**scope.get("state", {}), "caller": caller, "models": models, "is_open": answer.is_allowed}
        guarded = {**scope, "state": state}
        try:
            await self._app(guarded, _replay(body, receive), answer.send_message)
        except* AnswerCutError:
            # the server closes a connection whose answer does not end
            if not answer.has_started:
                reason = model_quarantined() if store.is_admitted(caller) else _invalid_key()
                await send_refusal(reason, scope, send)

    @contextlib.contextmanager
    def _count_reader(self, caller: Caller) -> Iterator[None]:
        """Bound the bodies that one key may have in memory before its budget is asked."""
        key_id = caller.key_id
        if self._num_readers[key_id] >= max(1, self._key_store.limits_of(key_id).concurrency):
            raise RequestRefused(
                429, "budget_exceeded", "The budget concurrency of this key is used up.", retry_after_s=1
            )
        self._num_readers[key_id] += 1
        try:
            yield
        finally:
            self._num_readers[key_id] -= 1
            if not self._num_readers[key_id]:
                del self._num_readers[key_id]

    async def _read_body(self, receive: Receive, length: int | None) -> bytes:
        """Read a body whole.

        Args:
            length: The header's number; a server that lets more through is not believed.
        """
        parts, num_bytes = [], 0
        try:
            async with asyncio.timeout(self._bounds.body_timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise AnswerCutError
                    parts.append(message.get("body", b""))
                    num_bytes += len(parts[-1])
                    if num_bytes > (self._bounds.max_body_bytes if length is None else length):
                        raise body_too_large(self._bounds)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as exc:
            raise RequestRefused(408, "body_too_slow", "The body did not arrive in time.") from exc


class _Answer:
    """The messages of one answer on their way to the client."""

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send, self._timeout_s = send, timeout_s
        self.is_allowed: Callable[[], bool] = lambda: True
        self.has_started = False

    async def send_message(self, message: Message) -> None:
        """Send one message, unless the key is not valid any more or the client takes nothing."""
        if not self.is_allowed():
            raise AnswerCutError
        self.has_started = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send(message)
        except TimeoutError as exc:
            raise AnswerCutError from exc


def _read_secret(headers: list[tuple[bytes, bytes]]) -> str | None:
    """Return the one secret of a request; None where there is none, or where two headers say different things."""
    values = set()
    for name, value in headers:
        if name == b"x-api-key":
            values.add(value.strip())
        elif name == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            values.add(token.strip() if scheme.lower() == b"bearer" else b"")
    return values.pop().decode("latin-1") if len(values) == 1 else None


def _has_role(scope: Scope, caller: Caller) -> bool:
    try:
        check_caller(str(scope["path"]), caller.owner, None)
    except VerificationError:
        return False
    return True


def _role_missing() -> RequestRefused:
    return RequestRefused(403, "role_missing", "The owner of this key lacks the role for this route.")


def _invalid_key() -> RequestRefused:
    return RequestRefused(401, "invalid_api_key", "A valid API key is required.")


def model_quarantined() -> RequestRefused:
    """Return the answer to a request for a model that is out of service."""
    return RequestRefused(503, "model_quarantined", "The operator has taken this model out of service.", param="model")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the whole body once, and then waits for the client to leave."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    if "websocket.http.response" in (scope.get("extensions") or {}):
        refusal = _invalid_key()
        await send({"type": "websocket.http.response.start", "status": refusal.status, "headers": refusal.headers()})
        await send({"type": "websocket.http.response.body", "body": refusal.body(scope["path"])})
    else:
        await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
