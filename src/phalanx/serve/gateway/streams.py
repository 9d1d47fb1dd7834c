"""Answers that an engine sends piece by piece: each is cleaned, filtered and passed on before the next is read."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

from phalanx.serve.access.event_padding import EventPadder
from phalanx.serve.access.refusals import RequestRefused, error_body
from phalanx.serve.access.request_bounds import run_aside
from phalanx.serve.engine_links import EngineReply
from phalanx.serve.filters import HeldJson, StreamFilter, TextFilters, TextRefused
from phalanx.serve.gateway.answers import (
    REFUSED,
    AnswerFacts,
    TextPlace,
    parse_answer,
    read_pieces,
    text_places,
)
from phalanx.serve.gateway.config import GatewayLimits
from phalanx.serve.gateway.requests import ForwardedRequest
from phalanx.serve.gateway.responses import stream_response

_MAX_LINE_BYTES = 1024 * 1024
_MAX_TEXTS = 512
"""Texts of one answer that are filtered at the same time, each with what its filter holds back."""
_DELTA_TYPES = {"text": "text_delta", "thinking": "thinking_delta", "partial_json": "input_json_delta"}
_DONE = b"[DONE]"
_END = b"data: [DONE]\n\n"


class AnswerStream:
    """One answer on its way from an engine to a client.

    Memory is bounded by one line of the engine, the characters that filters hold back, and arguments of calls.
    """

    def __init__(
        self,
        request: ForwardedRequest,
        filters: TextFilters,
        facts: AnswerFacts,
        limits: GatewayLimits,
        padder: EventPadder | None = None,
    ) -> None:
        self._request, self._filters, self._facts, self._limits, self._padder = request, filters, facts, limits, padder
        self._streams: dict[tuple[int, tuple[str, ...]], StreamFilter | HeldJson] = {}
        self._num_held = self._number = 0
        self._is_messages = request.route.name == "messages"
        self._finished: set[object] = set()

    async def relay(self, answer: EngineReply, finish: Callable[[], None]) -> AsyncIterator[bytes]:
        """Yield events for the client; a fault is an event as well, since the status has been sent.

        Args:
            finish: Counts and records the answer; called before its last event goes out.
        """
        try:
            async for line in self._read_lines(answer):
                if line == _DONE:
                    for part in await run_aside(self._num_held, lambda: list(self._unfinished_parts())):
                        yield self._encode_part(part)
                    self._facts.has_ended, self._facts.status = True, 200
                    finish()
                    yield _END
                    return
                for part in await run_aside(len(line) + self._num_held, partial(self._convert_line, line)):
                    is_last = part.get("type") == "message_stop"
                    if is_last:
                        self._facts.has_ended, self._facts.status = True, 200
                        finish()
                    yield self._encode_part(part)
                    if is_last:
                        return
            raise _broken_off()
        except TextRefused as exc:
            self._facts.status = 200
            self._facts.verdicts[f"{exc.filter_name}: refused"] = None
            for part in self._refusal_parts():
                yield self._encode_part(part)
            if not self._is_messages:
                yield _END
        except RequestRefused as refusal:
            self._facts.status = refusal.status
            body = error_body(self._request.route.path, refusal.status, refusal.message, refusal.code)
            yield (b"event: error\n" if self._is_messages else b"") + b"data: " + body + b"\n\n"
        finally:
            # a copy: where the client has left, a thread may still be at a long line
            for stream in list(self._streams.values()):
                self._facts.add_notes(stream.notes)

    async def _read_lines(self, answer: EngineReply) -> AsyncIterator[bytes]:
        """Yield the data of each event."""
        rest = bytearray()
        async for piece in read_pieces(answer, self._limits.max_answer_s):
            self._facts.num_bytes += len(piece)
            rest += piece
            *lines, _ = rest.split(b"\n") if b"\n" in piece else (b"",)
            del rest[: sum(len(line) + 1 for line in lines)]
            if self._facts.num_bytes > self._limits.max_answer_bytes or len(rest) > _MAX_LINE_BYTES:
                raise RequestRefused(502, "answer_too_long", "The engine's answer is too long.")
            for line in lines:
                if line.startswith(b"data:"):
                    yield bytes(line.removeprefix(b"data:").strip())
                    # a thousand events may have come at once, and a client that has room for them stops nothing
                    await asyncio.sleep(0)

    def _convert_line(self, line: bytes) -> list[dict[str, Any]]:
        return list(self._convert_part(parse_answer(line, self._request, is_part=True)))

    def _convert_part(self, part: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self._is_messages:
            yield from self._convert_event(part)
            return
        self._facts.read_usage(part.get("usage"))
        choices, origin = part.get("choices"), part.pop("phalanx", None)
        if not choices:
            # the count of tokens, which is always asked for here and goes on to those who asked for it
            if self._request.wants_usage:
                yield part
            return
        if not self._request.wants_usage:
            part.pop("usage", None)
        for choice in choices:
            self._filter_choice(choice)
        if any(choice.get("finish_reason") is not None for choice in choices):
            part["phalanx"] = self._facts.describe_origin(origin)
        yield part

    def _filter_choice(self, choice: dict[str, Any]) -> None:
        number = choice.get("index", 0)
        self._feed_places(number, text_places(choice))
        if choice.get("finish_reason") is not None:
            self._finished.add(number)
            for key, rest in self._close_streams(number):
                _append_text(choice, key, rest)

    def _convert_event(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """As `_convert_part`, for events of ``/v1/messages``; a delta of an unknown kind is left out."""
        self._facts.read_usage((event.get("message") or {}).get("usage"))
        self._facts.read_usage(event.get("usage"))
        number = event.get("index") or 0
        self._feed_places(number, text_places({**event, "message": None}))
        if event["type"] == "content_block_delta" and (event.get("delta") or {}).get("type") is None:
            return
        for block in (event.get("content_block") or {}, event.get("delta") or {}):
            # the arguments come in pieces
            if "input" in block:
                block["input"] = {}
        if event["type"] == "content_block_stop":
            self._finished.add(number)
            for (key,), rest in self._close_streams(number):
                delta = {"type": _DELTA_TYPES[key], key: rest}
                yield {"type": "content_block_delta", "index": number, "delta": delta}
        if event["type"] == "message_stop" and self._streams:
            # a block whose end is held back has not ended
            raise _broken_off()
        origin = event.pop("phalanx", None)
        if event["type"] == "message_delta":
            event["phalanx"] = self._facts.describe_origin(origin)
        yield event

    def _feed_places(self, number: int, places: list[TextPlace]) -> None:
        self._number = number
        for place in places:
            key = number, place.stream_key
            if place.text and not self._finished.isdisjoint((number, key)):
                # the filter has let go of the end of the text, and would not see what this makes of it
                raise RequestRefused(502, "engine_failed", "The engine goes on with a text that it has finished.")
            if place.key == "name":
                # comes whole, and no client can use a part of it
                self._filters.check_output(place.text)
                self._finished.update([key] if place.text else [])
                continue
            stream = self._streams.get(key)
            if stream is None:
                if len(self._streams) >= _MAX_TEXTS:
                    raise RequestRefused(502, "answer_too_long", "The engine's answer has too many texts.")
                stream = self._filters.open_json() if place.is_json else self._filters.open_stream()
                self._streams[key] = stream
            self._num_held += len(place.text) if place.is_json else 0
            place.holder[place.key] = stream.feed(place.text)
            self._facts.keep_answer(key, place.holder[place.key])

    def _close_streams(self, number: int) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield the held-back ends of the texts of one choice, by text."""
        for index, key in [name for name in self._streams if name[0] == number]:
            stream = self._streams.pop((index, key))
            rest = stream.close()
            self._facts.add_notes(stream.notes)
            if rest:
                self._facts.keep_answer((index, key), rest)
                yield key, rest

    def _unfinished_parts(self) -> Iterator[dict[str, Any]]:
        """Yield what filters hold back of texts that the engine has ended without a reason."""
        for number in dict.fromkeys(number for number, _ in self._streams):
            for key, rest in self._close_streams(number):
                choice: dict[str, Any] = {"index": number, "finish_reason": None}
                _append_text(choice, key, rest)
                yield self._make_part(choice)

    def _refusal_parts(self) -> Iterator[dict[str, Any]]:
        if self._is_messages:
            yield {"type": "message_delta", "delta": {"stop_reason": "refusal"}, "usage": {"output_tokens": 0}}
            yield {"type": "message_stop"}
            return
        yield self._make_part({"index": self._number, "finish_reason": REFUSED})

    def _make_part(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Make a part of a stream with one choice, which has a text, an empty one where it has none yet."""
        is_chat = self._request.route.name == "chat"
        choice = {"delta": {}, **choice} if is_chat else {"text": "", **choice}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        return {"id": "end", "object": kind, "created": 0, "model": self._request.model, "choices": [choice]}

    def _encode_part(self, part: dict[str, Any]) -> bytes:
        head = f"event: {part['type']}\n" if self._is_messages and "type" in part else ""
        event = f"{head}data: {json.dumps(part)}\n\n"
        return (event if self._padder is None else self._padder.pad_event(event)).encode()


def stream_whole_answer(answer: dict[str, Any], request: ForwardedRequest) -> Iterator[bytes]:
    """Yield a whole answer, which has been filtered, as the events of a stream."""
    if request.route.name == "responses":
        yield from stream_response(answer)
        return
    usage = answer.pop("usage", None)
    if request.route.name == "chat":
        answer["object"] = "chat.completion.chunk"
        for choice in answer["choices"]:
            message = choice.pop("message", None) or {}
            if message.get("tool_calls"):
                message["tool_calls"] = [{**call, "index": n} for n, call in enumerate(message["tool_calls"])]
            choice["delta"] = message
    yield b"data: " + json.dumps(answer).encode() + b"\n\n"
    if request.wants_usage:
        yield b"data: " + json.dumps({**answer, "choices": [], "usage": usage}).encode() + b"\n\n"
    yield _END


def _append_text(choice: dict[str, Any], key: tuple[str, ...], rest: str) -> None:
    """Add held-back text to the last part of a choice."""
    if key == ("text",):
        choice["text"] = (choice.get("text") or "") + rest
        return
    if choice.get("delta") is None:
        choice["delta"] = {}
    delta = choice["delta"]
    if key[0] != "tool":
        delta[key[0]] = (delta.get(key[0]) or "") + rest
        return
    calls = delta["tool_calls"] = delta.get("tool_calls") or []
    for number, call in enumerate(calls):
        if str(call.get("index", number)) == key[1] and call.get("function"):
            call["function"][key[2]] = (call["function"].get(key[2]) or "") + rest
            return
    calls.append({"index": int(key[1]), "function": {key[2]: rest}})


def _broken_off() -> RequestRefused:
    return RequestRefused(502, "engine_failed", "The engine's answer broke off.")
