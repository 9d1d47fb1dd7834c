"""Answers of engines: reduced to fields of the protocol, filtered and counted; an engine's texts of errors end here."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx2

from phalanx.config import printable_text
from phalanx.serve.access.refusals import RequestRefused
from phalanx.serve.filters import StreamFilter, TextFilters, TextRefused
from phalanx.serve.gateway.requests import ForwardedRequest

_MAX_COUNT = 2**53
_ANSWER_KEYS = frozenset(
    {"id", "object", "created", "model", "choices", "usage", "data", "system_fingerprint", "phalanx"}
)
_ANSWER_KEYS |= {
    "type",
    "role",
    "content",
    "stop_reason",
    "stop_sequence",
    "message",
    "index",
    "delta",
    "content_block",
}
_CHOICE_KEYS = frozenset({"index", "message", "delta", "text", "finish_reason", "logprobs"})
_MESSAGE_KEYS = frozenset({"role", "content", "refusal", "tool_calls", "reasoning_content", "reasoning"})
_USAGE_KEYS = frozenset({"prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens"})
_TEXT_KEYS = ("content", "text", "reasoning_content", "reasoning", "refusal", "partial_json", "thinking")
_CACHED_KEYS = ("cache_read_input_tokens", "cache_creation_input_tokens")
_KNOWN_CODES = {"context_length_exceeded": "context_length_exceeded"}
_KNOWN_CODES |= {"exceed_context_size_error": "context_length_exceeded"}
_ORIGIN_KEYS = frozenset({"model_digest", "marked", "filters", "refused_by"})
_UNMARKED = "no (engine behind a gateway)"
_MAX_MARKS, _MAX_MARK = 64, 60
REFUSED = "content_filter"
_SSE = "text/event-stream"


@dataclass
class AnswerFacts:
    """Facts about an answer that has ended.

    Attributes:
        prompt_tokens: Count of the engine; None where it gave none, or one that makes no sense.
        completion_tokens: Count of the engine, like `prompt_tokens`.
        verdicts: Verdicts of filters, without duplicates.
        marks: Names of the watermarks that the engine says it has set.
        num_bytes: Bytes that came from the engine.
        is_complete: The client got all that it was to get.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    verdicts: dict[str, None] = field(default_factory=dict)
    marks: tuple[str, ...] = (_UNMARKED,)
    num_bytes: int = 0
    is_complete: bool = False

    def read_usage(self, usage: Any) -> None:
        """Take the counts out of an engine's usage; a value that makes no sense is ignored."""
        if not isinstance(usage, Mapping):
            return
        prompt = _count(usage.get("prompt_tokens", usage.get("input_tokens")))
        completion = _count(usage.get("completion_tokens", usage.get("output_tokens")))
        self.prompt_tokens = self.prompt_tokens if prompt is None else prompt
        self.completion_tokens = self.completion_tokens if completion is None else completion

    def describe_origin(self, origin: Any) -> dict[str, Any]:
        """Return the field ``phalanx`` of an answer: marks, and verdicts of the gateway's filters.

        Args:
            origin: The same field of an engine that is a server of this program; anything else counts as none.
        """
        described = (
            {key: part for key, part in origin.items() if key in _ORIGIN_KEYS} if isinstance(origin, dict) else {}
        )
        marks = described.get("marked")
        if isinstance(marks, list):
            self.marks = tuple(printable_text(str(mark), _MAX_MARK) for mark in marks[:_MAX_MARKS])
        return {**described, "marked": list(self.marks), "gateway_filters": list(self.verdicts)}

    def add_notes(self, stream: StreamFilter) -> None:
        """Remember the notes of a filter on a text that passed."""
        self.verdicts.update(dict.fromkeys(f"{note.filter}: {note.kind}" for note in stream.notes))


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else None


async def check_status(answer: httpx2.Response, request: ForwardedRequest, max_bytes: int) -> None:
    """Return where an engine accepts a request, and answers as a stream where one is wanted.

    Raises:
        RequestRefused: It does not; nothing of its text goes on but a word that the protocol has.
    """
    wants_stream = bool(request.payload.get("stream"))
    if answer.status_code == 200 and (not wants_stream or answer.headers.get("content-type", "").startswith(_SSE)):
        return
    code = _error_code(await read_whole(answer, max_bytes))
    if answer.status_code in {400, 404, 413, 422}:
        raise RequestRefused(400, code, "The engine refuses the request.")
    raise RequestRefused(502, "engine_failed", "The engine failed.")


def _error_code(body: bytes) -> str:
    """Return the code of an engine's error where the protocol knows it."""
    try:
        error = json.loads(body)["error"]
        named = [str(error.get(key)) for key in ("code", "type")]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        named = []
    return next((_KNOWN_CODES[name] for name in named if name in _KNOWN_CODES), "engine_refused")


async def read_whole(answer: httpx2.Response, max_bytes: int) -> bytes:
    """Read an answer of at most so many bytes.

    Raises:
        RequestRefused: It is longer, or ends too early.
    """
    parts, num_bytes = [], 0
    async for part in read_pieces(answer):
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise RequestRefused(502, "answer_too_long", "The engine's answer is too long.")
    return b"".join(parts)


async def read_pieces(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield an answer as it comes, one piece in memory at a time.

    Raises:
        RequestRefused: The link to the engine breaks.
    """
    try:
        async for part in answer.aiter_raw():
            yield part
    except httpx2.HTTPError as exc:
        raise RequestRefused(502, "engine_failed", "The engine's answer broke off.") from exc


def clean_answer(body: bytes, request: ForwardedRequest, filters: TextFilters, facts: AnswerFacts) -> dict[str, Any]:
    """Return a whole answer for the client.

    Raises:
        RequestRefused: It is no JSON object, or a filter refuses its text.
    """
    facts.num_bytes += len(body)
    answer = parse_answer(body, request.model)
    facts.read_usage(answer.get("usage"))
    for text in answer_texts(answer):
        stream = filters.open_stream()
        try:
            stream.feed(text)
            stream.close()
        except TextRefused as exc:
            facts.verdicts[f"{exc.filter_name}: refused"] = None
            message = f"The filter {exc.filter_name} refuses the answer."
            raise RequestRefused(403, REFUSED, message) from exc
        finally:
            facts.add_notes(stream)
    if request.route.name != "embeddings":
        answer["phalanx"] = facts.describe_origin(answer.get("phalanx"))
    return answer


def parse_answer(body: bytes, model: str) -> dict[str, Any]:
    """Parse an answer or a part of a stream, without keys that the protocol does not have.

    Raises:
        RequestRefused: It is no JSON object.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise RequestRefused(502, "engine_failed", "The engine's answer is not valid JSON.") from exc
    if not isinstance(value, dict) or "error" in value:
        raise RequestRefused(502, "engine_failed", "The engine failed.")
    answer = {key: part for key, part in value.items() if key in _ANSWER_KEYS}
    if "model" in answer:
        answer["model"] = model
    if isinstance(answer.get("usage"), dict):
        answer["usage"] = _clean_usage(answer["usage"])
    if isinstance(answer.get("choices"), list):
        answer["choices"] = [_clean_choice(choice) for choice in answer["choices"] if isinstance(choice, dict)]
    if isinstance(answer.get("message"), dict):
        answer["message"] = {**answer["message"], "model": model}
        if isinstance(answer["message"].get("usage"), dict):
            answer["message"]["usage"] = _clean_usage(answer["message"]["usage"])
    return answer


def _clean_usage(usage: dict[str, Any]) -> dict[str, int]:
    """Return the counts alone; which part of a prompt was in a cache tells of the prompts of others."""
    counts = {key: count for key in _USAGE_KEYS if (count := _count(usage.get(key))) is not None}
    if "input_tokens" in counts:
        counts["input_tokens"] += sum(_count(usage.get(key)) or 0 for key in _CACHED_KEYS)
    return counts


def _clean_choice(choice: dict[str, Any]) -> dict[str, Any]:
    cleaned = {key: part for key, part in choice.items() if key in _CHOICE_KEYS}
    for name in ("message", "delta"):
        if isinstance(cleaned.get(name), dict):
            cleaned[name] = {key: part for key, part in cleaned[name].items() if key in _MESSAGE_KEYS}
    return cleaned


def answer_texts(answer: dict[str, Any]) -> Iterator[str]:
    """Yield each text that a model wrote in a whole answer, arguments of tools included."""
    for choice in answer.get("choices", ()):
        for place in text_places(choice):
            yield place.text
    content = answer.get("content")
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict):
            for place in text_places({"delta": block}):
                yield place.text
            if isinstance(block.get("input"), dict):
                yield json.dumps(block["input"], ensure_ascii=False)


@dataclass(frozen=True)
class TextPlace:
    """A text inside an answer or a part of a stream, and which of the answer's texts it belongs to."""

    holder: dict[str, Any]
    key: str
    stream_key: tuple[str, ...]

    @property
    def text(self) -> str:
        """The text that is there."""
        return str(self.holder[self.key])


def text_places(choice: dict[str, Any]) -> list[TextPlace]:
    """Return the texts of a choice, or of a part of it."""
    places = []
    for name in ("message", "delta"):
        part = choice.get(name)
        if not isinstance(part, dict):
            continue
        places += [TextPlace(part, key, (key,)) for key in _TEXT_KEYS if isinstance(part.get(key), str)]
        calls = part.get("tool_calls")
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                index = str(call.get("index", number))
                places += [
                    TextPlace(function, key, ("tool", index, key))
                    for key in ("name", "arguments")
                    if isinstance(function.get(key), str)
                ]
    if isinstance(choice.get("text"), str):
        places.append(TextPlace(choice, "text", ("text",)))
    return places
