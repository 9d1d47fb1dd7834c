"""Answers of engines: reduced to fields of the protocol, filtered and counted; an engine's texts of errors end here."""

import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from phalanx.errors import PeerLostError
from phalanx.serve.access.refusals import RequestRefused
from phalanx.serve.engine_links import EngineReply
from phalanx.serve.filters import FilterNote, TextFilters, TextRefused
from phalanx.serve.gateway.answer_schemas import EngineAnswer, EngineEvent, EngineMessage, EngineOrigin, Vectors
from phalanx.serve.gateway.requests import ForwardedRequest
from phalanx.serve.gateway.responses import ModelResponse, output_texts

_MAX_COUNT = 2**53
_USAGE_KEYS = frozenset({"prompt_tokens", "completion_tokens", "total_tokens", "input_tokens", "output_tokens"})
_TEXT_KEYS = ("content", "text", "reasoning_content", "reasoning", "refusal", "partial_json", "thinking")
_CACHED_KEYS = ("cache_read_input_tokens", "cache_creation_input_tokens")
_KNOWN_CODES = {"context_length_exceeded": "context_length_exceeded"}
_KNOWN_CODES |= {"exceed_context_size_error": "context_length_exceeded"}
_UNMARKED = "no (engine behind a gateway)"
REFUSED = "content_filter"
LEFT = 499
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
        has_ended: The engine has sent all of it; its count before that is no count of the whole.
        status: Status in the log: 200 where the client got all that it was to get, 499 where it left.
        answers: Pieces of the texts that went out, by their place; None where nobody wants them.
    """

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    verdicts: dict[str, None] = field(default_factory=dict)
    marks: tuple[str, ...] = (_UNMARKED,)
    num_bytes: int = 0
    has_ended: bool = False
    status: int = LEFT
    answers: dict[object, list[str]] | None = None

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
        try:
            described = EngineOrigin.model_validate(origin or {}).model_dump(exclude_none=True)
        except ValidationError:
            described = {}
        self.marks = tuple(described.get("marked", self.marks))
        return {**described, "marked": list(self.marks), "gateway_filters": list(self.verdicts)}

    def keep_answer(self, place: object, text: str) -> None:
        """Remember a piece of a text that goes out, where texts are wanted."""
        if self.answers is not None and text:
            self.answers.setdefault(place, []).append(text)

    def add_notes(self, notes: Iterable[FilterNote]) -> None:
        """Remember the notes of filters on a text that passed."""
        self.verdicts.update(dict.fromkeys(f"{note.filter}: {note.kind}" for note in notes))


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else None


async def check_status(answer: EngineReply, request: ForwardedRequest, max_bytes: int, max_s: float) -> None:
    """Return where an engine accepts a request, and answers as a stream where one is wanted.

    Raises:
        RequestRefused: It does not; nothing of its text goes on but a word that the protocol has.
    """
    wants_stream = bool(request.payload.get("stream"))
    if answer.status == 200 and (not wants_stream or answer.content_type.startswith(_SSE)):
        return
    code = _error_code(await read_whole(answer, max_bytes, max_s))
    if answer.status in {400, 404, 413, 422}:
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


async def read_whole(answer: EngineReply, max_bytes: int, max_s: float) -> bytes:
    """Read an answer of at most so many bytes.

    Raises:
        RequestRefused: It is longer, takes longer, or ends too early.
    """
    content = bytearray()
    async for part in read_pieces(answer, max_s):
        content += part
        if len(content) > max_bytes:
            raise RequestRefused(502, "answer_too_long", "The engine's answer is too long.")
    return bytes(content)


async def read_pieces(answer: EngineReply, max_s: float) -> AsyncIterator[bytes]:
    """Yield an answer as it comes, one piece in memory at a time.

    Args:
        max_s: Seconds for all pieces; an engine that sends a byte now and then would never end.

    Raises:
        RequestRefused: The link to the engine breaks, or the time is over.
    """
    end = time.monotonic() + max_s
    try:
        async for part in answer.read_pieces():
            yield part
            if time.monotonic() > end:
                raise RequestRefused(502, "answer_too_long", "The engine's answer takes too long.")
    except PeerLostError as exc:
        raise RequestRefused(502, "engine_failed", "The engine's answer broke off.") from exc


def clean_answer(body: bytes, request: ForwardedRequest, filters: TextFilters, facts: AnswerFacts) -> dict[str, Any]:
    """Return a whole answer for the client.

    Raises:
        RequestRefused: It has another form, or a filter refuses its text.
    """
    facts.num_bytes += len(body)
    answer = parse_answer(body, request)
    facts.has_ended = True
    facts.read_usage(answer.get("usage"))
    texts = list(answer_texts(answer))
    try:
        for text, is_json in texts:
            facts.add_notes(filters.check_json(text) if is_json else filters.check_output(text))
    except TextRefused as exc:
        facts.verdicts[f"{exc.filter_name}: refused"] = None
        message = f"The filter {exc.filter_name} refuses the answer."
        raise RequestRefused(403, REFUSED, message) from exc
    for choice in answer.get("choices") or ():
        _filter_alternatives(choice.get("logprobs") or {}, filters, facts)
    # a text goes out where none of the answer is refused
    for place, (text, _) in enumerate(texts):
        facts.keep_answer(place, text)
    origin = answer.pop("phalanx", None)
    if request.route.name != "embeddings":
        answer["phalanx"] = facts.describe_origin(origin)
    return answer


def parse_answer(body: bytes, request: ForwardedRequest, *, is_part: bool = False) -> dict[str, Any]:
    """Parse an answer or a part of a stream; keys that the protocol does not have are left out.

    Raises:
        RequestRefused: It is no JSON, a value has another type, or there are more answers than were asked for.
    """
    form = _FORMS.get(request.route.name, EngineAnswer)
    form = EngineEvent if is_part and form is EngineMessage else form
    try:
        answer = form.model_validate_json(body).model_dump(exclude_unset=True)
        if form is EngineMessage:
            # arguments of tools are any JSON, and may hold a number that is not finite
            json.dumps(answer["content"], allow_nan=False)
    except ValueError as exc:
        raise RequestRefused(502, "engine_failed", "The engine's answer has another form.") from exc
    choices = answer.get("choices") or []
    lacks_choices = form is EngineAnswer and answer.get("choices") is None and not is_part
    if answer.pop("error", None) is not None or lacks_choices:
        raise RequestRefused(502, "engine_failed", "The engine failed.")
    if max([len(choices), *(choice.get("index", 0) + 1 for choice in choices)]) > request.num_choices:
        raise RequestRefused(502, "engine_failed", "The engine sends more answers than were asked for.")
    if is_part or request.payload.get("logprobs", False) is False:
        for choice in choices:
            choice.pop("logprobs", None)
    for part in (answer, answer.get("message") or {}, answer.get("delta") or {}):
        if "model" in part:
            part["model"] = request.model
        if "usage" in part:
            part["usage"] = _clean_usage(part["usage"])
        if part.get("stop_sequence", "") not in ("", *request.payload.get("stop_sequences", ())):
            part["stop_sequence"] = None
    return answer


_FORMS: dict[str, type[EngineAnswer | Vectors | EngineMessage | EngineEvent | ModelResponse]] = {
    "embeddings": Vectors,
    "messages": EngineMessage,
    "responses": ModelResponse,
}


def _clean_usage(usage: Any) -> dict[str, int] | None:
    """Return the counts alone; which part of a prompt was in a cache tells of the prompts of others."""
    if not isinstance(usage, dict):
        return None
    counts = {key: count for key in _USAGE_KEYS if (count := _count(usage.get(key))) is not None}
    if "input_tokens" in counts:
        counts["input_tokens"] += sum(_count(usage.get(key)) or 0 for key in _CACHED_KEYS)
    return counts


def answer_texts(answer: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield each text that a model wrote in a whole answer, scored tokens included, and whether it is JSON."""
    for choice in answer.get("choices") or ():
        yield from ((place.text, place.is_json) for place in text_places(choice))
        scores = choice.get("logprobs") or {}
        listed = scores.get("content") or ()
        tokens = "".join(scores.get("tokens") or ()), "".join(score["token"] for score in listed)
        spelled = b"".join(bytes(score.get("bytes") or score["token"].encode()) for score in listed)
        yield from ((text, False) for text in dict.fromkeys((*tokens, spelled.decode("utf-8", "replace"))))
    yield from output_texts(answer)
    for block in answer.get("content") or ():
        yield from ((place.text, place.is_json) for place in text_places({"delta": block}))
        if block.get("input"):
            yield json.dumps(block["input"], ensure_ascii=False), True


def _filter_alternatives(scores: dict[str, Any], filters: TextFilters, facts: AnswerFacts) -> None:
    """Leave out the tokens that are scored beside those of a text where a filter refuses them: the text lacks them.

    They are read one by one, and as the texts that the likeliest ones, the second ones and so on make together.
    """
    tokens = scores.get("content") or ()
    rows = [list(row or ()) for row in scores.get("top_logprobs") or ()]
    rows += [[other["token"] for other in score.get("top_logprobs") or ()] for score in tokens]
    ranks = map("".join, itertools.zip_longest(*rows, fillvalue=""))
    try:
        filters.check_output("\n".join([*ranks, *dict.fromkeys(itertools.chain(*rows))]))
    except TextRefused as exc:
        facts.verdicts[f"{exc.filter_name}: alternatives"] = None
        for score in (scores, *tokens):
            score["top_logprobs"] = []


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

    @property
    def is_json(self) -> bool:
        """Whether its reader undoes escapes."""
        return self.key in ("arguments", "partial_json")


def text_places(choice: dict[str, Any]) -> list[TextPlace]:
    """Return the texts of a choice, or of a part of it."""
    places = []
    for name in ("message", "delta", "content_block"):
        part = choice.get(name) or {}
        places += [TextPlace(part, key, (key,)) for key in (*_TEXT_KEYS, "name") if part.get(key) is not None]
        for number, call in enumerate(part.get("tool_calls") or ()):
            function = call.get("function") or {}
            index = str(call.get("index", number))
            keys = [key for key in ("name", "arguments") if function.get(key) is not None]
            places += [TextPlace(function, key, ("tool", index, key)) for key in keys]
    if choice.get("text") is not None:
        places.append(TextPlace(choice, "text", ("text",)))
    return places
