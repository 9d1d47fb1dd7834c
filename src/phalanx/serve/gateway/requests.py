"""A request from its bytes to the payload of an engine: parsed once, checked, filtered and bounded."""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from phalanx.config import StrictModel
from phalanx.data.rules.pii import find_personal_data
from phalanx.serve.access.refusals import RequestRefused
from phalanx.serve.access.request_bounds import RequestBounds, check_nesting, parse_object
from phalanx.serve.filters import TextFilters, TextRefused, map_texts
from phalanx.serve.gateway.config import GatewayLimits, RouteName
from phalanx.serve.gateway.responses import ResponsesRequest
from phalanx.serve.gateway.schemas import (
    PRIVATE_FIELDS,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    MessagesRequest,
)

_TOKENS_PER_MESSAGE = 32
"""More than any chat template in use adds to one message, or to a prompt."""
_MAX_KEY = 40
_STRUCTURE = frozenset({"text", "function", "system", "developer", "user", "assistant", "tool", "tool_use", "object"})
"""Texts between the texts of people: personal data that they cut in two is still found."""
_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef", "$id"})
_TAG_ERRORS = frozenset({"literal_error", "union_tag_invalid"})
_MEDIA = frozenset({"image_url", "input_image", "image", "input_audio", "audio", "file", "document", "video_url"})


@dataclass(frozen=True)
class Route:
    """One route that is forwarded; all others do not exist.

    Attributes:
        prompt_keys: Keys of the request that hold text for the model.
        dropped: Keys that say who asks, which an engine need not know.
    """

    name: RouteName
    path: str
    schema: type[StrictModel]
    prompt_keys: tuple[str, ...]
    dropped: tuple[str, ...] = ("user",)


_CHAT_KEYS = ("messages", "tools", "response_format", "stop", "tool_choice")
ROUTES = (
    Route("chat", "/v1/chat/completions", ChatRequest, _CHAT_KEYS),
    Route("completions", "/v1/completions", CompletionRequest, ("prompt", "suffix", "stop")),
    Route("embeddings", "/v1/embeddings", EmbeddingRequest, ("input",)),
    Route(
        "messages",
        "/v1/messages",
        MessagesRequest,
        ("system", "messages", "tools", "stop_sequences", "tool_choice"),
        ("metadata",),
    ),
    Route(
        "responses",
        "/v1/responses",
        ResponsesRequest,
        ("input", "instructions", "tools", "text", "tool_choice"),
        ("user", "metadata", "store"),
    ),
)


@dataclass(frozen=True)
class ForwardedRequest:
    """A request that may be forwarded.

    Attributes:
        owner: Owner of the caller's key.
        payload: The body for an engine, but for its own name of the model.
        max_prompt_tokens: No tokenizer makes more of the prompt: one a byte, and the template's.
        max_completion_tokens: Tokens of all answers together.
        num_choices: Answers that may come, those to all prompts together.
        is_collected: The client wants a stream and the engine sends the answer whole: log-probabilities name tokens of
            a text that a filter may still refuse, and events of responses repeat it.
        is_sensitive: It holds personal data, or token ids, which nobody here can read.
        has_scores: The client asked for log-probabilities.
        wants_usage: The client asked for the last chunk of a stream that counts tokens.
        wants_padding: Whether the client wants events of one length; None where it does not say.
        notes: Remarks of filters on texts that passed.
    """

    route: Route
    owner: str
    model: str
    payload: dict[str, Any]
    max_prompt_tokens: int
    max_completion_tokens: int
    num_choices: int
    is_sensitive: bool
    is_stream: bool
    is_collected: bool
    has_scores: bool
    wants_usage: bool
    wants_padding: bool | None
    notes: tuple[str, ...]

    @property
    def prompts(self) -> dict[str, Any]:
        """The fields that hold text for the model."""
        return {key: self.payload[key] for key in self.route.prompt_keys if key in self.payload}

    def prompt_words(self) -> list[list[str]]:
        """Return the words of each prompt, for its sketch; token ids count as words.

        Fields beside the prompts, such as instructions, are part of each of them: the model reads them too.
        """
        key = "prompt" if "prompt" in self.payload else "input"
        value = self.payload.get(key)
        is_several = isinstance(value, list) and not any(isinstance(part, int | dict) for part in value)
        prompts: list[Any] = value if is_several and isinstance(value, list) else [value]
        beside = [self.payload[name] for name in self.route.prompt_keys if name in self.payload and name != key]
        return [_words([beside, prompt]) for prompt in prompts]


def read_request(
    route: Route, body: bytes, owner: str, limits: GatewayLimits, filters: TextFilters
) -> ForwardedRequest:
    """Check a whole request.

    Raises:
        RequestRefused: With a text that quotes no value of the request.
    """
    payload = _validate(route, parse_object(body), limits)
    prompts = {key: payload[key] for key in route.prompt_keys if key in payload}
    has_token_ids = _has_token_ids(payload.get("prompt", payload.get("input")))
    if has_token_ids and not limits.allow_token_prompts:
        raise RequestRefused(400, "token_prompt", "Send the prompt as text; no filter here can read token ids.")
    _check_references([prompts.get(key) for key in ("tools", "tool_choice", "response_format", "text")])
    notes: list[str] = []
    filtered, texts = _filter_strings(prompts, filters, notes)
    payload.update(filtered)
    choices, completion_tokens = _bound_completion(route, payload, limits)
    num_prompts = _count_prompts(payload.get("prompt"))
    is_stream = bool(payload.get("stream"))
    options = payload.pop("stream_options", None) or {}
    has_scores = payload.get("logprobs") is not None and payload["logprobs"] is not False
    is_collected = is_stream and (has_scores or route.name == "responses")
    if route.name != "embeddings":
        payload["stream"] = is_stream and not is_collected
    if route.name == "responses":
        payload["store"] = False
    if payload.get("stream") and route.name != "messages":
        payload["stream_options"] = {"include_usage": True}
    return ForwardedRequest(
        route=route,
        owner=owner,
        model=payload["model"],
        payload=payload,
        max_prompt_tokens=_bound_prompt(filtered),
        max_completion_tokens=completion_tokens * choices * num_prompts,
        num_choices=choices * num_prompts,
        is_sensitive=has_token_ids or holds_personal_data(texts),
        is_stream=is_stream,
        is_collected=is_collected,
        has_scores=has_scores,
        wants_usage=bool(options.get("include_usage")),
        wants_padding=options.get("include_obfuscation"),
        notes=tuple(dict.fromkeys(notes)),
    )


def holds_personal_data(texts: list[str]) -> bool:
    """Whether the personal-data rules of data builds find something in texts, or in them joined.

    Finds what has a form: addresses of e-mail and machines, numbers of phones, cards, accounts and persons. Does not
    find names, addresses of houses, or data that is encoded or written around.
    """
    joined = {"\n".join(texts), "".join(texts)}
    plain = {unicodedata.normalize("NFKC", text) for text in joined}
    return any(find_personal_data(text) for text in joined | plain)


def _validate(route: Route, value: dict[str, Any], limits: GatewayLimits) -> dict[str, Any]:
    if limits.private_fields == "strip":
        value = {key: part for key, part in value.items() if key not in PRIVATE_FIELDS}
    try:
        request = route.schema.model_validate_json(json.dumps(value))
    except (ValidationError, ValueError) as exc:
        raise _explain(exc) from exc
    payload = request.model_dump(mode="json", exclude_unset=True, by_alias=True)
    return {key: part for key, part in payload.items() if part is not None and key not in route.dropped}


def _explain(exc: ValueError) -> RequestRefused:
    """Return a refusal that names the key alone."""
    if not isinstance(exc, ValidationError):
        return RequestRefused(400, "invalid_json", "The body is not valid JSON.")
    errors = exc.errors(include_url=False, include_context=False)
    if any(error["type"] in _TAG_ERRORS and _names_media(error["input"]) for error in errors):
        message = "Content must be text: nothing is fetched from addresses here."
        return RequestRefused(400, "unsupported_content", message, param="messages")
    place = [part for part in errors[0]["loc"] if isinstance(part, str)]
    key = place[0] if place and place[0].isidentifier() and place[0].isascii() else None
    param = key[:_MAX_KEY] if key else None
    if errors[0]["type"] == "extra_forbidden":
        return RequestRefused(400, "unknown_field", "The request has a field that is not supported here.", param=param)
    if errors[0]["type"] == "missing":
        return RequestRefused(400, "missing_field", "The request lacks a field.", param=param)
    return RequestRefused(400, "invalid_value", "A field of the request has a value that is not allowed.", param=param)


def _names_media(value: Any) -> bool:
    kind = value.get("type") if isinstance(value, dict) else value
    return isinstance(kind, str) and kind in _MEDIA


def _words(value: Any) -> list[str]:
    """Return the words of all texts and numbers in JSON."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [word for part in value for word in _words(part)]
    return [] if value is None else str(value).split()


def _has_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and any(isinstance(part, int | list) for part in prompt)


def _count_prompts(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def _check_references(value: Any) -> None:
    """Refuse JSON schemas that refer to anything but themselves: an engine might fetch it."""
    for key, part in _entries(value):
        if key in _REFERENCES and isinstance(part, str) and not part.startswith("#"):
            raise RequestRefused(400, "foreign_reference", "A schema may refer to parts of itself alone.")


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            yield from part.items()
            waiting.extend(part.values())
        elif isinstance(part, list | tuple):
            waiting.extend(part)


def _filter_strings(value: Any, filters: TextFilters, notes: list[str]) -> tuple[Any, list[str]]:
    """Return the same data with each text as filters admit it, and the texts; names of keys are checked as well."""
    texts: list[str] = []

    def admit(text: str) -> str:
        if text in _STRUCTURE:
            return text
        try:
            admitted = filters.admit_input(text)
        except TextRefused as exc:
            message = f"The filter {exc.filter_name} refuses the text."
            raise RequestRefused(400, "text_refused", message, param=exc.filter_name) from exc
        notes.extend(f"{note.filter}: {note.kind}" for note in admitted.notes)
        texts.append(admitted.text)
        return admitted.text

    filtered = map_texts(value, admit)
    for arguments in _call_arguments(filtered):
        # JSON inside JSON: escapes hide its texts from filters
        content = (arguments or "{}").encode("utf-8")
        check_nesting(content, RequestBounds())
        map_texts(parse_object(content), admit)
    return filtered, texts


def _call_arguments(prompts: Mapping[str, Any]) -> Iterator[str]:
    for message in prompts.get("messages", ()):
        for call in message.get("tool_calls") or ():
            yield call["function"]["arguments"]
    items = prompts.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and item.get("type") == "function_call":
            yield item["arguments"]


def _bound_completion(route: Route, payload: dict[str, Any], limits: GatewayLimits) -> tuple[int, int]:
    """Return the number of answers and the most tokens of one, which the payload then says as well."""
    if route.name == "embeddings":
        return 1, 0
    choices = payload.get("n") or 1
    if choices > limits.max_choices:
        raise RequestRefused(400, "too_many_choices", f"At most {limits.max_choices} answers.", param="n")
    asked = [payload[key] for key in ("max_completion_tokens", "max_tokens", "max_output_tokens") if key in payload]
    if len(set(asked)) > 1:
        raise RequestRefused(400, "invalid_value", "Two limits of tokens that differ.", param="max_tokens")
    tokens = asked[0] if asked else limits.default_completion_tokens
    if not tokens and not payload.get("echo"):
        # engines that score no prompts take it for no limit
        raise RequestRefused(400, "invalid_value", "0 tokens are asked for with echo alone.", param="max_tokens")
    if tokens > limits.max_completion_tokens:
        message = f"An answer may have at most {limits.max_completion_tokens} tokens."
        raise RequestRefused(400, "too_many_tokens", message, param="max_tokens")
    # engines that know only one of the two names would otherwise write without a limit
    payload.pop("max_completion_tokens", None)
    payload["max_output_tokens" if route.name == "responses" else "max_tokens"] = tokens
    return choices, tokens


def _bound_prompt(prompts: dict[str, Any]) -> int:
    """Return an upper bound of the prompt's tokens: a token has at least one byte, or is an id itself."""
    num_bytes = len(json.dumps(prompts, ensure_ascii=False).encode("utf-8", "surrogatepass"))
    messages = prompts.get("messages", prompts.get("input", ()))
    num_messages = len(messages) if isinstance(messages, list) else 1
    return num_bytes + _TOKENS_PER_MESSAGE * (num_messages + 1)
