"""Bounds of a request, checked before anything reads its content."""

import asyncio
import json
import math
import re
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from phalanx.config import StrictModel, parse_strict_json
from phalanx.serve.access.refusals import RequestRefused, Scope

_Seconds = Annotated[float, Field(gt=0, le=3600)]
_Result = TypeVar("_Result")
_MAX_LOOP_BYTES = 8192


class RequestBounds(StrictModel):
    """Bounds of one request and its connection.

    Attributes:
        max_body_bytes: A longer body is refused before it is read.
        max_json_depth: Lists and objects in one another.
        max_json_parts: Texts, lists and objects of one body together; it bounds the time of reading it.
        header_timeout_s: Time between the opening of a connection, or the end of an answer, and the last header.
        body_timeout_s: Time between the last header and the end of the body.
        send_timeout_s: Time that a client has to take one piece of an answer.
        max_connections: Connections of all clients together.
    """

    max_body_bytes: Annotated[int, Field(ge=1024, le=64 * 1024 * 1024)] = 2 * 1024 * 1024
    max_header_bytes: Annotated[int, Field(ge=1024, le=64 * 1024)] = 16 * 1024
    max_headers: Annotated[int, Field(ge=8, le=1000)] = 64
    max_path_bytes: Annotated[int, Field(ge=64, le=16 * 1024)] = 2048
    max_json_depth: Annotated[int, Field(ge=4, le=100)] = 32
    max_json_parts: Annotated[int, Field(ge=100, le=1_000_000)] = 100_000
    header_timeout_s: _Seconds = 10
    body_timeout_s: _Seconds = 30
    send_timeout_s: _Seconds = 60
    max_connections: Annotated[int, Field(ge=1, le=100_000)] = 2000
    max_connections_per_address: Annotated[int, Field(ge=1, le=100_000)] = 1100


def check_head(scope: Scope, bounds: RequestBounds) -> int | None:
    """Check path and headers and return the length that the body is said to have.

    Raises:
        RequestRefused: One of them is too long, or the body is compressed, too long, of two lengths or no JSON.
    """
    headers = scope["headers"]
    num_bytes = sum(len(name) + len(value) for name, value in headers)
    if len(headers) > bounds.max_headers or num_bytes > bounds.max_header_bytes:
        raise RequestRefused(431, "headers_too_large", "The request has too many or too long headers.")
    if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > bounds.max_path_bytes:
        raise RequestRefused(414, "path_too_long", "The path is too long.")
    if not scope["path"].isprintable():
        # a router takes a path for the same one without the line end behind it
        raise RequestRefused(400, "wrong_path", "The path holds a control character.")
    values = {name: value for name, value in headers if name in _BODY_HEADERS}
    if values.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RequestRefused(415, "compressed_body", "The body must not be compressed.")
    length = values.get(b"content-length")
    if any(name == b"transfer-encoding" for name, _ in headers) and length is not None:
        # a proxy before this server could end the body elsewhere, and take its rest for another client's request
        raise RequestRefused(400, "two_lengths", "The length of the body is said in two ways.")
    if length is None:
        return None
    if not length.isdigit() or len(length) > 12:
        raise RequestRefused(400, "wrong_length", "The header Content-Length is no number.")
    if int(length) > bounds.max_body_bytes:
        raise body_too_large(bounds)
    return int(length)


_BODY_HEADERS = {b"content-encoding", b"content-length", b"content-type"}


def body_too_large(bounds: RequestBounds) -> RequestRefused:
    """Return the refusal of a body that is longer than allowed."""
    return RequestRefused(413, "body_too_large", f"The body may have at most {bounds.max_body_bytes} bytes.")


def check_body(body: bytes, scope: Scope, bounds: RequestBounds) -> None:
    """Check the type and the nesting of a whole body; an empty one passes.

    Raises:
        RequestRefused: It is no JSON by its header, nested too deep, or of too many parts.
    """
    if not body:
        return
    content_type = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if content_type.partition(b";")[0].strip().lower() != b"application/json":
        raise RequestRefused(415, "wrong_content_type", "The body must be application/json.")
    check_nesting(body, bounds)


def check_nesting(text: bytes, bounds: RequestBounds) -> None:
    """Check depth and parts of JSON before anything parses it.

    Raises:
        RequestRefused: It is nested too deep, or of too many parts.
    """
    depth = 0
    for number, part in enumerate(_PART.finditer(text), 1):
        mark = text[part.start()]
        depth += _STEPS.get(mark, 0)
        if depth > bounds.max_json_depth:
            raise RequestRefused(400, "json_too_deep", f"The body is nested deeper than {bounds.max_json_depth}.")
        if number > bounds.max_json_parts:
            raise RequestRefused(400, "json_too_large", f"The body has more than {bounds.max_json_parts} parts.")


async def run_aside(num_bytes: int, work: Callable[[], _Result]) -> _Result:
    """Return the result of work on a text: beyond 8 kB in a thread, since filters take seconds for the longest ones."""
    return work() if num_bytes <= _MAX_LOOP_BYTES else await asyncio.to_thread(work)


def parse_object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object that two readers cannot understand differently.

    Raises:
        RequestRefused: It is no JSON object, has a key twice, a number that is not finite, or half a character.
    """
    try:
        value = parse_strict_json(text, parse_float=_finite_number)
        if b"\\u" in text:
            # half of a surrogate pair is no character, and cannot be written again
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as exc:
        raise RequestRefused(400, "invalid_json", "The body is not valid JSON.") from exc
    if not isinstance(value, dict):
        raise RequestRefused(400, "invalid_json", "The body must be a JSON object.")
    return value


def _finite_number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("a number is too large")
    return number


# a text that does not end goes on to the end of the body, so that no character is looked at twice
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{}\]]', re.DOTALL)
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
