"""POST /v1/responses, as far as it needs no state: nothing is stored, and nothing earlier is referred to."""

import json
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.data.chat import ChatMessage
from phalanx.data.chat.conversation import ToolCall
from phalanx.serve.access import Caller
from phalanx.serve.api.chat import FunctionSpec, describe_origin, read_call, schema_grammar
from phalanx.serve.api.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheFields,
    Content,
    JsonObject,
    MaxTokens,
    Metadata,
    ModelId,
    Temperature,
    Text,
    ToolName,
    TopP,
    join_parts,
    make_id,
    make_seed,
    make_tool,
)
from phalanx.serve.api.service import CallPiece, ModelReply, ReplyFinish
from phalanx.serve.engine import GenerationRequest, Grammar, SamplingSettings, TextPiece
from phalanx.serve.engine.text_assembler import TokenNames


class InputMessage(StrictModel):
    """A message of the input; an earlier answer brings an id and a status."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: Annotated[str, Field(max_length=200)] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class InputCall(StrictModel):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    name: ToolName
    arguments: Text
    id: Annotated[str, Field(max_length=200)] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class InputResult(StrictModel):
    """The result of an earlier call."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    output: Text
    id: Annotated[str, Field(max_length=200)] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


InputItem = InputMessage | InputCall | InputResult


class ResponseTool(FunctionSpec):
    """A function that may be called; no other tool is."""

    type: Literal["function"]


class NamedResponseTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function"]
    name: ToolName


class ResponseTextFormat(StrictModel):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=64)] | None = None
    description: Annotated[str, Field(max_length=8192)] | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(StrictModel):
    """How the text is written."""

    format: ResponseTextFormat | None = None


class ResponsesBody(CacheFields):
    """The body of a request; every other field is refused, `previous_response_id` included."""

    model: ModelId
    input: Text | Annotated[tuple[InputItem, ...], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    tools: Annotated[tuple[ResponseTool, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    mark: bool | None = None
    metadata: Metadata | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    user: Annotated[str, Field(max_length=256)] | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.stream)

    def translate(self, caller: Caller) -> list[GenerationRequest]:
        """Return the internal request."""
        messages = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        choice = self.tool_choice
        return [
            GenerationRequest(
                model=self.model,
                owner=caller.owner,
                cache_salt=self.cache_salt or "",
                reuses_prompt=self.cache_prompt is not False,
                wants_mark=self.mark is not False,
                may_skip_mark=caller.may_skip_mark,
                messages=tuple([*messages, *self._messages()]),
                tools=tuple(make_tool(tool.name, tool.description, tool.parameters) for tool in self.tools or ()),
                tool_choice=choice.name if isinstance(choice, NamedResponseTool) else choice or "auto",
                sampling=SamplingSettings(
                    temperature=1.0 if self.temperature is None else self.temperature,
                    top_p=1.0 if self.top_p is None else self.top_p,
                    seed=make_seed(None),
                ),
                max_tokens=self.max_output_tokens,
                grammar=self._grammar(),
            )
        ]

    def _messages(self) -> list[ChatMessage]:
        if isinstance(self.input, str):
            return [ChatMessage(role="user", content=self.input)]
        messages: list[ChatMessage] = []
        for item in self.input:
            if isinstance(item, InputMessage):
                role = "system" if item.role == "developer" else item.role
                messages.append(ChatMessage(role=role, content=join_parts(item.content) or ""))
            elif isinstance(item, InputResult):
                messages.append(ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id))
            else:
                call = read_call(item.call_id, item.name, item.arguments)
                messages.append(ChatMessage(role="assistant", content="", tool_calls=(call,)))
        return messages

    def _grammar(self) -> Grammar | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type == "text":
            return None
        return Grammar(kind="json_object") if form.type == "json_object" else schema_grammar(form.schema_ or {})


class ResponsesWriter:
    """Writes a reply in the form of the route."""

    def __init__(self, body: ResponsesBody, reply: ModelReply, _names: TokenNames) -> None:
        self._body, self._reply = body, reply
        self._id, self._created = make_id("resp_"), int(time.time())
        self._items: list[dict[str, Any]] = []
        self._sequence = 0
        self._is_text_open = False

    async def write_whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        finish: ReplyFinish = "stop"
        async for event in self._reply.read_events():
            if isinstance(event, TextPiece):
                self._add_text(event.text)
            elif isinstance(event, CallPiece):
                self._items.append(_describe_call(event.call))
            else:
                finish = event.finish
        return self._describe(finish)

    def _add_text(self, text: str) -> None:
        if not self._items or self._items[-1]["type"] != "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": make_id("msg_"), "role": "assistant", "status": "in_progress"}
            self._items.append({**item, "content": [part]})
        self._items[-1]["content"][0]["text"] += text

    def _describe(self, finish: ReplyFinish | None) -> dict[str, Any]:
        """Return the response as it stands; `finish` is None as long as it is written."""
        reasons = {"length": "max_output_tokens", "content_filter": "content_filter"}
        reason = None if finish is None else reasons.get(finish)
        status = "in_progress" if finish is None else "completed" if reason is None else "incomplete"
        if finish is not None:
            for item in self._items:
                item["status"] = status if item["type"] == "message" else "completed"
        usage = self._reply.usage
        choice = self._body.tool_choice
        tokens = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.reused_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "instructions": self._body.instructions,
            "max_output_tokens": self._body.max_output_tokens,
            "model": self._reply.card.id,
            "output": list(self._items),
            "parallel_tool_calls": True if self._body.parallel_tool_calls is None else self._body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if self._body.temperature is None else self._body.temperature,
            "top_p": 1.0 if self._body.top_p is None else self._body.top_p,
            "tool_choice": choice.model_dump() if isinstance(choice, NamedResponseTool) else choice or "auto",
            "tools": [tool.model_dump() for tool in self._body.tools or ()],
            "truncation": "disabled",
            "metadata": self._body.metadata or {},
            "usage": None if finish is None else tokens,
            **({} if finish is None else {"phalanx": describe_origin(self._reply)}),
        }

    async def write_stream(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events, numbered."""
        yield self._event("response.created", {"response": self._describe(None)})
        yield self._event("response.in_progress", {"response": self._describe(None)})
        finish: ReplyFinish = "stop"
        async for event in self._reply.read_events():
            if isinstance(event, TextPiece):
                if event.text:
                    yield self._write_text(event.text)
            elif isinstance(event, CallPiece):
                yield self._close_text() + self._write_call(event.call)
            else:
                finish = event.finish
        yield self._close_text()
        response = self._describe(finish)
        yield self._event(f"response.{response['status']}", {"response": response})

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _write_text(self, text: str) -> str:
        begin = ""
        if not self._is_text_open:
            self._is_text_open = True
            self._add_text("")
            item = {**self._items[-1], "content": []}
            begin = self._event("response.output_item.added", {"output_index": len(self._items) - 1, "item": item})
            begin += self._event(
                "response.content_part.added", {**self._place(), "part": self._items[-1]["content"][0]}
            )
        self._add_text(text)
        return begin + self._event("response.output_text.delta", {**self._place(), "delta": text, "logprobs": []})

    def _close_text(self) -> str:
        if not self._is_text_open:
            return ""
        self._is_text_open = False
        item = self._items[-1]
        item["status"] = "completed"
        part = item["content"][0]
        return (
            self._event("response.output_text.done", {**self._place(), "text": part["text"], "logprobs": []})
            + self._event("response.content_part.done", {**self._place(), "part": part})
            + self._event("response.output_item.done", {"output_index": len(self._items) - 1, "item": item})
        )

    def _write_call(self, call: ToolCall) -> str:
        item = _describe_call(call)
        self._items.append(item)
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        index = {"output_index": place["output_index"]}
        begin = {**item, "arguments": "", "status": "in_progress"}
        done = {**place, "arguments": item["arguments"], "name": item["name"]}
        return (
            self._event("response.output_item.added", {**index, "item": begin})
            + self._event("response.function_call_arguments.delta", {**place, "delta": item["arguments"]})
            + self._event("response.function_call_arguments.done", done)
            + self._event("response.output_item.done", {**index, "item": item})
        )

    def _event(self, name: str, content: dict[str, Any]) -> str:
        self._sequence += 1
        body = {"type": name, "sequence_number": self._sequence - 1, **content}
        return f"event: {name}\ndata: {json.dumps(body)}\n\n"


def _describe_call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    head = {"type": "function_call", "id": make_id("fc_"), "call_id": call.id, "status": "completed"}
    return {**head, "name": call.name, "arguments": arguments}
