"""Answers that refuse a request, in the form of the protocol that the route speaks, with texts from this file alone."""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MESSAGES_ROUTE = "/v1/messages"
"""Route whose errors, and the errors below it, have another form than all others."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(path: str, status: int, message: str, code: str, param: str | None = None) -> bytes:
    """Return the body of an error.

    Args:
        path: The request's path, which decides the form.
        message: Text for people; never quotes a value of the request.
        code: One word for programs, the same for each occurrence of the fault.
        param: Key of the request that is at fault; a name from a schema.
    """
    if path == MESSAGES_ROUTE or path.startswith(MESSAGES_ROUTE + "/"):
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    error = {"message": message, "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


class RequestRefused(Exception):  # noqa: N818 - an answer to a client, and no fault of anybody
    """A request is answered with an error.

    Attributes:
        code: One word for programs, the same for each occurrence of the fault.
        param: Key of the request that is at fault.
        retry_after_s: After how many seconds the same request may pass; None where it never will.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.param, self.retry_after_s = param, retry_after_s

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the answer beside its length."""
        headers = [(b"content-type", b"application/json")]
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(self.retry_after_s).encode("ascii")))
        return headers

    def body(self, path: str) -> bytes:
        """Return the body of the answer for a route."""
        return error_body(path, self.status, self.message, self.code, self.param)


def route_of(scope: Scope) -> str:
    """Return the path of a request's route for a log: with names of parameters, whose values are a client's texts."""
    if "endpoint" not in scope:
        return "unknown"
    path = str(scope["path"])
    for name, value in scope.get("path_params", {}).items():
        path = path.removesuffix(str(value)) + f"{{{name}}}"
    return path


async def send_refusal(refusal: RequestRefused, scope: Scope, send: Send) -> None:
    """Send a refusal and have the connection closed: the rest of the request is not read."""
    body = b"" if scope["method"] == "HEAD" else refusal.body(scope["path"])
    headers = [*refusal.headers(), (b"content-length", str(len(body)).encode("ascii")), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
