"""Bounded fields that several protocols share, and the reading of a body."""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from phalanx.config import StrictModel
from phalanx.serve.access import RequestBounds, RequestRefused, check_nesting, parse_object
from phalanx.serve.engine import BadRequestError, Tool
from phalanx.serve.engine.request import MAX_CHOICES, MAX_TOKENS, MAX_TOP_LOGPROBS

MAX_TEXT = 1 << 20
MAX_MESSAGES = 2048
MAX_TOOLS = 128

ModelId = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(min_length=1, max_length=256)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}\z")]
Temperature = Annotated[float, Field(ge=0.0, le=2.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
TopK = Annotated[int, Field(ge=0, lt=1 << 24)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Choices = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,7}\z")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=1024),
]
JsonObject = Annotated[dict[str, Any], Field(max_length=256)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]

_MAX_DETAIL = 160
_QUOTED = re.compile(r"'[^']{40,}'")


class CacheFields(StrictModel):
    """Fields of vLLM and llama.cpp by which a gateway keeps its clients from timing each other's prompts.

    Attributes:
        cache_salt: A prompt is reused by requests with the same salt, and never across owners of keys.
        cache_prompt: False reuses and stores nothing.
    """

    cache_salt: Annotated[str, Field(max_length=128)] | None = None
    cache_prompt: bool | None = None


class OtherPart(BaseModel):
    """An image, a sound, a file or anything else that would have to be fetched or parsed: refused with a reason."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        raise ValueError("only text is read; nothing is fetched from a URL, and files and media are refused")


def tag_part(value: Any) -> str:
    """Return the kind of a part by which its model is chosen."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _PART_KINDS.get(kind, "other") if isinstance(kind, str) else "other"


_PART_KINDS = {"text": "text", "input_text": "text", "output_text": "text", "tool_use": "use", "tool_result": "result"}


def text_or_other(part: Any) -> str:
    """Return the kind of a part where text alone may stand."""
    return "text" if tag_part(part) == "text" else "other"


class ContentPart(StrictModel):
    """A part of a message that is text; parts of earlier answers bring empty lists."""

    type: Literal["text", "input_text", "output_text"]
    text: Text
    annotations: Annotated[tuple[JsonObject, ...], Field(max_length=0)] = ()
    logprobs: Annotated[tuple[JsonObject, ...], Field(max_length=0)] | None = None


AnyPart = Annotated[
    Annotated[ContentPart, Tag("text")] | Annotated[OtherPart, Tag("other")], Discriminator(text_or_other)
]


Content = Text | Annotated[tuple[AnyPart, ...], Field(max_length=MAX_MESSAGES)]


def join_parts(content: str | Sequence[ContentPart | OtherPart] | None) -> str | None:
    """Return the text of a message's content."""
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, ContentPart))


Body = TypeVar("Body", bound=StrictModel)
Translated = TypeVar("Translated")


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Read a body strictly.

    Raises:
        RequestRefused: 400 with the field at fault; no part of the body is repeated.
    """
    parse_object(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as exc:
        raise _refuse_fields(exc) from None
    except (ValueError, RecursionError) as exc:
        raise RequestRefused(400, "invalid_json", "The body is no JSON of this route.") from exc


def _refuse_fields(exc: ValidationError) -> RequestRefused:
    """Return a refusal that names the field at fault."""
    errors = exc.errors(include_url=False, include_input=False, include_context=False)
    # of a union, the member with a reason of ours
    first = next((error for error in errors if error["type"] == "value_error"), errors[0])
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("function-", "constrained-")))
    message = _QUOTED.sub("...", first["msg"].removeprefix("Value error, "))[:_MAX_DETAIL]
    param = place[:64] or None
    return RequestRefused(400, "invalid_request", f"{place[:64]}: {message}" if place else message, param=param)


def translate_body(translate: Callable[[], Translated]) -> Translated:
    """Return the internal requests that a body is translated to.

    Raises:
        RequestRefused: 400: two fields contradict each other, or a value is none that the engine takes.
    """
    try:
        return translate()
    except BadRequestError as exc:
        raise refuse_bad_request(exc) from exc
    except ValidationError as exc:
        # what passed the body's own bounds, and not the narrower ones of a message or a tool
        raise _refuse_fields(exc) from None


def parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of an earlier call, which are JSON inside JSON and bounded like the body."""
    content = (text or "{}").encode("utf-8")
    try:
        check_nesting(content, RequestBounds())
        return parse_object(content)
    except RequestRefused as exc:
        raise BadRequestError("the arguments of a tool call are no JSON object", "messages") from exc


def refuse_bad_request(exc: BadRequestError) -> RequestRefused:
    """Return the answer to a request that cannot be done."""
    return RequestRefused(400, "invalid_request", str(exc)[:_MAX_DETAIL], param=exc.parameter)


def make_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Tool:
    """Return a tool.

    Raises:
        BadRequestError: Its description or schema is too long.
    """
    if len(json.dumps(parameters or {})) > 1 << 16 or len(description or "") > 8192:
        raise BadRequestError("a tool's description or schema is too long", "tools")
    return Tool(name=name, description=description or "", parameters=parameters or {})


def make_seed(seed: int | None) -> int:
    """Return the seed of a draw: the client's, or a fresh one."""
    return secrets.randbits(63) if seed is None else seed % (1 << 63)


def make_id(prefix: str) -> str:
    """Return a fresh id of an answer."""
    return prefix + secrets.token_hex(12)
