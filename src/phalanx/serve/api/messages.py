"""POST /v1/messages: the Anthropic protocol."""

import json
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from phalanx.config import StrictModel
from phalanx.data.chat import ChatMessage
from phalanx.data.chat.conversation import ToolCall
from phalanx.serve.access import Caller
from phalanx.serve.api.chat import describe_origin, schema_grammar
from phalanx.serve.api.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheFields,
    JsonObject,
    MaxTokens,
    ModelId,
    OtherPart,
    Stop,
    Text,
    ToolName,
    TopK,
    TopP,
    make_id,
    make_seed,
    make_tool,
    tag_part,
    text_or_other,
)
from phalanx.serve.api.service import CallPiece, ModelReply, ReplyEnd
from phalanx.serve.engine import BadRequestError, GenerationRequest, SamplingSettings, TextPiece
from phalanx.serve.engine.request import MAX_STOPS
from phalanx.serve.engine.text_assembler import TokenNames

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "stop_sequence": "stop_sequence",
    "content_filter": "refusal",
}


class CacheControl(StrictModel):
    """A client's wish to have a prefix kept; prefixes are kept anyway, and nothing is promised."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    """A block of text."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl | None = None


TextBlocks = (
    Text
    | Annotated[
        tuple[
            Annotated[
                Annotated[TextBlock, Tag("text")] | Annotated[OtherPart, Tag("other")], Discriminator(text_or_other)
            ],
            ...,
        ],
        Field(max_length=256),
    ]
)


class ToolUseBlock(StrictModel):
    """An earlier call of a tool."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=200)]
    name: ToolName
    input: JsonObject
    cache_control: CacheControl | None = None


class ToolResultBlock(StrictModel):
    """The result of an earlier call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=200)]
    content: TextBlocks = ""
    is_error: bool | None = None
    cache_control: CacheControl | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ToolUseBlock, Tag("use")]
    | Annotated[ToolResultBlock, Tag("result")]
    | Annotated[OtherPart, Tag("other")],
    Discriminator(tag_part),
]


class MessageTurn(StrictModel):
    """A turn of the user or the assistant."""

    role: Literal["user", "assistant"]
    content: Text | Annotated[tuple[Block, ...], Field(min_length=1, max_length=MAX_MESSAGES)]

    def translate(self) -> list[ChatMessage]:
        """Return the turn as one or several messages: each result of a tool is one.

        Raises:
            BadRequestError: A block is in the turn of the other role.
        """
        if isinstance(self.content, str):
            return [ChatMessage(role=self.role, content=self.content)]
        misplaced = ToolUseBlock if self.role == "user" else ToolResultBlock
        if any(isinstance(block, misplaced) for block in self.content):
            raise BadRequestError("only the assistant calls tools, and only the user brings their results", "messages")
        texts = [block.text for block in self.content if isinstance(block, TextBlock)]
        calls = tuple(
            ToolCall(id=block.id, name=block.name, arguments=block.input)
            for block in self.content
            if isinstance(block, ToolUseBlock)
        )
        results = [
            ChatMessage(role="tool", content=_join_blocks(block.content), tool_call_id=block.tool_use_id)
            for block in self.content
            if isinstance(block, ToolResultBlock)
        ]
        if texts or calls:
            return [*results, ChatMessage(role=self.role, content="\n".join(texts), tool_calls=calls)]
        return results


def _join_blocks(content: str | tuple[TextBlock | OtherPart, ...]) -> str:
    return content if isinstance(content, str) else "\n".join(b.text for b in content if isinstance(b, TextBlock))


class MessageTool(StrictModel):
    """A tool of the client's own."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Annotated[str, Field(max_length=8192)] | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolRule(StrictModel):
    """Whether a tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class MessageMetadata(StrictModel):
    """Facts about the request; not read."""

    user_id: Annotated[str, Field(max_length=256)] | None = None


class NoThinking(StrictModel):
    """Thoughts are not told apart from text."""

    type: Literal["disabled"]


class OutputSchema(StrictModel):
    """A JSON schema that the text must fit."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class MessageForm(StrictModel):
    """The form of the text."""

    format: OutputSchema | None = None


class CountBody(CacheFields):
    """The body of a request to count tokens."""

    model: ModelId
    messages: Annotated[tuple[MessageTurn, ...], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks | None = None
    tools: Annotated[tuple[MessageTool, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolRule | None = None
    thinking: NoThinking | None = None

    def make_request(
        self, caller: Caller, max_tokens: int, stop: tuple[str, ...], sampling: SamplingSettings
    ) -> GenerationRequest:
        """Return the internal request."""
        messages = [message for turn in self.messages for message in turn.translate()]
        if self.system:
            messages.insert(0, ChatMessage(role="system", content=_join_blocks(self.system)))
        rule = self.tool_choice
        names = {"any": "required", "tool": (rule.name if rule is not None else None) or ""}
        tools = [make_tool(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()]
        return GenerationRequest(
            model=self.model,
            owner=caller.owner,
            cache_salt=self.cache_salt or "",
            reuses_prompt=self.cache_prompt is not False,
            messages=tuple(messages),
            tools=tuple(tools),
            tool_choice="auto" if rule is None else names.get(rule.type, rule.type),
            sampling=sampling,
            max_tokens=max_tokens,
            stop=stop,
        )


class MessagesBody(CountBody):
    """The body of a request; every other field is refused."""

    max_tokens: MaxTokens
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stop_sequences: Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    output_config: MessageForm | None = None
    cache_control: CacheControl | None = None
    mark: bool | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.stream)

    def translate(self, caller: Caller) -> list[GenerationRequest]:
        """Return the internal request."""
        sampling = SamplingSettings(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=make_seed(None),
        )
        request = self.make_request(caller, self.max_tokens, self.stop_sequences or (), sampling)
        schema = None if self.output_config is None or self.output_config.format is None else self.output_config.format
        changes = {
            "wants_mark": self.mark is not False,
            "may_skip_mark": caller.may_skip_mark,
            "grammar": None if schema is None else schema_grammar(schema.schema_),
        }
        return [request.model_copy(update=changes)]


class MessagesWriter:
    """Writes a reply in the form of the route."""

    def __init__(self, _body: MessagesBody, reply: ModelReply, _names: TokenNames) -> None:
        self._reply = reply
        self._head = {"id": make_id("msg_"), "type": "message", "role": "assistant", "model": reply.card.id}
        self._place = -1
        self._is_text_open = False

    async def write_whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        blocks: list[dict[str, Any]] = []
        end: ReplyEnd | None = None
        async for event in self._reply.read_events():
            if isinstance(event, TextPiece):
                if not blocks or blocks[-1]["type"] != "text":
                    blocks.append({"type": "text", "text": "", "citations": None})
                blocks[-1]["text"] += event.text
            elif isinstance(event, CallPiece):
                blocks.append(_describe_use(event.call) | {"input": event.call.arguments})
            else:
                end = event
        # white space between calls is no answer
        has_calls = any(block["type"] == "tool_use" for block in blocks)
        blocks = [block for block in blocks if block["type"] != "text" or not has_calls or block["text"].strip()]
        return {**self._head, "content": blocks, **_describe_end(end), "usage": self._usage()} | self._origin()

    def _usage(self) -> dict[str, int]:
        usage = self._reply.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.reused_tokens,
            "cache_read_input_tokens": usage.reused_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage.completion_tokens,
        }

    def _origin(self) -> dict[str, Any]:
        return {"phalanx": describe_origin(self._reply)}

    async def write_stream(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events."""
        begin: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", {"message": {**begin, "usage": {**self._usage(), "output_tokens": 0}}})
        async for event in self._reply.read_events():
            if isinstance(event, TextPiece):
                if event.text:
                    yield self._open_text() + self._delta({"type": "text_delta", "text": event.text})
            elif isinstance(event, CallPiece):
                yield self._close_block() + self._write_call(event.call)
            else:
                yield self._close_block()
                delta = {"delta": _describe_end(event), "usage": self._usage()}
                yield _event("message_delta", delta | self._origin())
        yield _event("message_stop", {})

    def _open_text(self) -> str:
        if self._is_text_open:
            return ""
        self._is_text_open = True
        self._place += 1
        block = {"type": "text", "text": "", "citations": None}
        return _event("content_block_start", {"index": self._place, "content_block": block})

    def _write_call(self, call: ToolCall) -> str:
        self._place += 1
        begin = _event("content_block_start", {"index": self._place, "content_block": _describe_use(call)})
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        delta = self._delta({"type": "input_json_delta", "partial_json": arguments})
        return begin + delta + _event("content_block_stop", {"index": self._place})

    def _delta(self, delta: dict[str, str]) -> str:
        return _event("content_block_delta", {"index": self._place, "delta": delta})

    def _close_block(self) -> str:
        if not self._is_text_open:
            return ""
        self._is_text_open = False
        return _event("content_block_stop", {"index": self._place})


def _describe_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": (call.id or "").replace("call_", "toolu_"), "name": call.name, "input": {}}


def _describe_end(end: ReplyEnd | None) -> dict[str, str | None]:
    if end is None:
        return {"stop_reason": None, "stop_sequence": None}
    return {"stop_reason": _STOP_REASONS[end.finish], "stop_sequence": end.stop}


def _event(name: str, content: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **content})}\n\n"
