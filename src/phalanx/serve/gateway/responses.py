"""``/v1/responses`` of an engine: what needs no store, fetched whole, filtered, then sent as a client wants it."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.serve.gateway.answer_schemas import AnswerPart, FreeText, WholePart, Word
from phalanx.serve.gateway.schemas import Name, Text

_Status = Literal["completed", "incomplete", "in_progress"]


class _InputPart(StrictModel):
    """A part of a message; other kinds, which hold addresses or media, do not exist here."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Annotated[tuple[None, ...], Field(max_length=0)] | None = None
    logprobs: Annotated[tuple[None, ...], Field(max_length=0)] | None = None


class _InputMessage(StrictModel):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[tuple[_InputPart, ...], Field(min_length=1, max_length=256)]
    id: Name | None = None
    status: _Status | None = None


class _InputCall(StrictModel):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: Text
    id: Name | None = None
    status: _Status | None = None


class _InputResult(StrictModel):
    type: Literal["function_call_output"]
    call_id: Name
    output: Text
    id: Name | None = None
    status: _Status | None = None


class _Tool(StrictModel):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _NamedTool(StrictModel):
    type: Literal["function"]
    name: Name


class _TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: Text | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _TextSettings(StrictModel):
    format: _TextFormat | None = None


class ResponsesRequest(StrictModel):
    """``POST /v1/responses``; nothing is stored, and nothing earlier is referred to."""

    model: Name
    input: Text | Annotated[tuple[_InputMessage | _InputCall | _InputResult, ...], Field(min_length=1, max_length=2000)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    text: _TextSettings | None = None
    tools: Annotated[tuple[_Tool, ...], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | _NamedTool | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    truncation: Literal["disabled"] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None


class _OutputPart(AnswerPart):
    type: Literal["output_text", "refusal", "reasoning_text"]
    text: FreeText | None = None
    refusal: FreeText | None = None


class _OutputItem(AnswerPart):
    type: Literal["message", "function_call", "reasoning"]
    id: Word | None = None
    role: Word | None = None
    status: _Status | None = None
    content: Annotated[list[_OutputPart], Field(max_length=256)] | None = None
    call_id: Word | None = None
    name: FreeText | None = None
    arguments: FreeText | None = None


class _Incomplete(AnswerPart):
    reason: Word | None = None


class ModelResponse(WholePart):
    """A whole answer."""

    id: Word | None = None
    object: Literal["response"] = "response"
    created_at: Annotated[float, Field(ge=0, le=2**53)] = 0
    status: Literal["completed", "incomplete"]
    incomplete_details: _Incomplete | None = None
    output: Annotated[list[_OutputItem], Field(max_length=1024)]


def output_texts(answer: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield each text that a model wrote, and whether it is JSON."""
    for item in answer.get("output") or ():
        for part in (item, *(item.get("content") or ())):
            keys = [key for key in ("text", "refusal", "name", "arguments") if part.get(key) is not None]
            yield from ((part[key], key == "arguments") for key in keys)


def stream_response(answer: dict[str, Any]) -> Iterator[bytes]:
    """Yield a whole answer, which has been filtered, as the events of a stream."""
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": f"response.{kind}", "response": begun} for kind in ("created", "in_progress")
    ]
    for number, item in enumerate(answer["output"]):
        place = {"output_index": number}
        bare = {**item, "status": "in_progress", **({"content": []} if "content" in item else {})}
        events.append({"type": "response.output_item.added", **place, "item": bare})
        place["item_id"] = item.get("id")
        for index, part in enumerate(item.get("content") or ()):
            part.setdefault("annotations", [])
            spot = {**place, "content_index": index}
            kind = f"response.{part['type']}"
            key = "refusal" if part["type"] == "refusal" else "text"
            events += [
                {"type": "response.content_part.added", **spot, "part": {**part, key: ""}},
                {"type": f"{kind}.delta", **spot, "delta": part.get(key) or "", "logprobs": []},
                {"type": f"{kind}.done", **spot, key: part.get(key) or "", "logprobs": []},
                {"type": "response.content_part.done", **spot, "part": part},
            ]
        if item["type"] == "function_call":
            kind, arguments = "response.function_call_arguments", item.get("arguments") or ""
            events.append({"type": f"{kind}.delta", **place, "delta": arguments})
            events.append({"type": f"{kind}.done", **place, "name": item.get("name"), "arguments": arguments})
        events.append({"type": "response.output_item.done", "output_index": number, "item": item})
    events.append({"type": f"response.{answer['status']}", "response": answer})
    for number, event in enumerate(events):
        yield f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n".encode()
