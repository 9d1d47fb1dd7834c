"""POST /v1/chat/completions."""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.data.chat import ChatMessage
from phalanx.data.chat.conversation import ToolCall
from phalanx.serve.access import Caller
from phalanx.serve.api.fields import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CacheFields,
    Choices,
    Content,
    JsonObject,
    LogitBias,
    MaxTokens,
    Metadata,
    ModelId,
    Name,
    Penalty,
    Seed,
    Stop,
    Temperature,
    Text,
    ToolName,
    TopK,
    TopLogprobs,
    TopP,
    join_parts,
    make_id,
    make_seed,
    make_tool,
    parse_arguments,
)
from phalanx.serve.api.service import CallPiece, ModelReply, ReplyEnd, ReplyEvent
from phalanx.serve.engine import (
    BadRequestError,
    GenerationRequest,
    Grammar,
    SamplingSettings,
    TextPiece,
    TokenScore,
    describe_call,
)
from phalanx.serve.engine.request import MAX_STOPS
from phalanx.serve.engine.text_assembler import TokenNames

FINISH = {"stop_sequence": "stop"}


class StreamOptions(StrictModel):
    """What a stream holds beside the pieces.

    Attributes:
        include_obfuscation: Give all events one length; where it is left out, streams over TLS have that.
    """

    include_usage: bool = False
    include_obfuscation: bool | None = None


class CalledFunction(StrictModel):
    """A call of a function in an earlier message; `arguments` is JSON."""

    name: ToolName
    arguments: Text


class MessageCall(StrictModel):
    """A call of a tool in an earlier message."""

    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatInput(StrictModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    refusal: None = None
    tool_calls: Annotated[tuple[MessageCall, ...], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None

    def translate(self) -> ChatMessage:
        """Return the message as templates take it.

        Raises:
            BadRequestError: A call's arguments are no JSON object, or another role than the assistant calls.
        """
        if self.tool_calls and self.role != "assistant":
            raise BadRequestError("only the assistant calls tools", "messages")
        calls = tuple(read_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ())
        return ChatMessage(
            role="system" if self.role == "developer" else self.role,
            content=join_parts(self.content) or "",
            name=self.name,
            tool_calls=calls,
            tool_call_id=self.tool_call_id,
        )


def read_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Return an earlier call."""
    return ToolCall(id=call_id[:200], name=name, arguments=parse_arguments(arguments))


class FunctionSpec(StrictModel):
    """A function that may be called."""

    name: ToolName
    description: Annotated[str, Field(max_length=8192)] | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolSpec(StrictModel):
    """A tool that may be called; functions alone."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(StrictModel):
    """The name of a function."""

    name: ToolName


class NamedTool(StrictModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class SchemaSpec(StrictModel):
    """A JSON schema that the text must fit."""

    name: Annotated[str, Field(max_length=64)] = "schema"
    description: Annotated[str, Field(max_length=8192)] | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class SchemaFormat(StrictModel):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaSpec


class GrammarFormat(StrictModel):
    """Text of a regular expression, or of a Lark grammar."""

    type: Literal["grammar"]
    syntax: Literal["regex", "lark"]
    definition: Annotated[str, Field(min_length=1, max_length=1 << 16)]


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat | GrammarFormat, Field(discriminator="type")]


def make_grammar(form: TextFormat | ObjectFormat | SchemaFormat | GrammarFormat | None) -> Grammar | None:
    """Return the grammar of a response format.

    Raises:
        BadRequestError: It holds a schema where none is checked, or one that is too long.
    """
    if isinstance(form, ObjectFormat):
        return Grammar(kind="json_object")
    if isinstance(form, GrammarFormat):
        if form.syntax == "lark" and "%json" in form.definition:
            raise BadRequestError("a Lark grammar holds no %json; send the schema as json_schema", "response_format")
        return Grammar(kind=form.syntax, source=form.definition)
    return schema_grammar(form.json_schema.schema_) if isinstance(form, SchemaFormat) else None


def schema_grammar(schema: dict[str, Any]) -> Grammar:
    """Return the grammar of a JSON schema."""
    source = json.dumps(schema)
    if len(source) > 1 << 16:
        raise BadRequestError("the schema is too long", "response_format")
    return Grammar(kind="json_schema", source=source)


class ChatBody(CacheFields):
    """The body of a request; every other field is refused."""

    model: ModelId
    messages: Annotated[tuple[ChatInput, ...], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Choices | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Stop | Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=10.0)] | None = None
    logit_bias: LogitBias | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    seed: Seed | None = None
    tools: Annotated[tuple[ToolSpec, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    store: Literal[False] | None = None
    mark: bool | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    safety_identifier: Annotated[str, Field(max_length=256)] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.stream)

    def translate(self, caller: Caller) -> list[GenerationRequest]:
        """Return the internal request."""
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequestError("needs logprobs=true", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("needs stream=true", "stream_options")
        choice = self.tool_choice
        tools = [
            make_tool(tool.function.name, tool.function.description, tool.function.parameters)
            for tool in self.tools or ()
        ]
        return [
            GenerationRequest(
                model=self.model,
                owner=caller.owner,
                cache_salt=self.cache_salt or "",
                reuses_prompt=self.cache_prompt is not False,
                wants_mark=self.mark is not False,
                may_skip_mark=caller.may_skip_mark,
                messages=tuple(message.translate() for message in self.messages),
                tools=tuple(tools),
                tool_choice=choice.function.name if isinstance(choice, NamedTool) else choice or "auto",
                sampling=make_sampling(self),
                max_tokens=self.max_completion_tokens or self.max_tokens,
                stop=(self.stop,) if isinstance(self.stop, str) else self.stop or (),
                n=self.n or 1,
                logprobs=(self.top_logprobs or 0) if self.logprobs else None,
                grammar=make_grammar(self.response_format),
            )
        ]


def make_sampling(body: Any) -> SamplingSettings:
    """Return the rule of the draw from a body with the common fields."""
    values = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "repetition_penalty": body.repetition_penalty,
    }
    bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
    settings = {name: value for name, value in values.items() if value is not None}
    return SamplingSettings(seed=make_seed(body.seed), logit_bias=bias, **settings)


def describe_usage(reply: ModelReply) -> dict[str, Any]:
    """Return the tokens of a reply as OpenAI's protocol writes them."""
    usage = reply.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.reused_tokens},
    }


def describe_origin(reply: ModelReply) -> dict[str, Any]:
    """Return the model's digest, the marks and the notes of filters, for the field `phalanx` of an answer."""
    return {
        "model_digest": reply.card.digest,
        "marked": reply.marks,
        "filters": [note.model_dump() for note in reply.notes],
        "refused_by": reply.verdicts,
    }


def _describe_scores(scores: Sequence[TokenScore], names: TokenNames) -> list[dict[str, Any]]:
    def describe(token: int, logprob: float) -> dict[str, Any]:
        return {"token": names.text_of(token), "logprob": logprob, "bytes": list(names.bytes_of(token))}

    return [
        {**describe(score.token, score.logprob), "top_logprobs": [describe(*pair) for pair in score.top]}
        for score in scores
    ]


class ChatReplyWriter:
    """Writes a reply in the form of the route."""

    def __init__(self, body: ChatBody, reply: ModelReply, names: TokenNames) -> None:
        self._body, self._reply, self._names = body, reply, names
        self._head = {
            "id": make_id("chatcmpl-"),
            "created": int(time.time()),
            "model": reply.card.id,
            "system_fingerprint": f"phx_{reply.card.digest[:16]}",
        }
        self._num_calls: dict[int, int] = {}

    async def write_whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices: dict[int, dict[str, Any]] = {}
        scores: dict[int, list[TokenScore]] = {}
        async for event in self._reply.read_events():
            choice = choices.setdefault(event.choice, {"content": "", "calls": [], "finish": ""})
            if isinstance(event, TextPiece):
                choice["content"] += event.text
                scores.setdefault(event.choice, []).extend(event.scores)
            elif isinstance(event, CallPiece):
                choice["calls"].append(describe_call(event.call))
            else:
                choice["finish"] = FINISH.get(event.finish, event.finish)
        described = [
            self._describe_choice(number, choice, scores.get(number, [])) for number, choice in sorted(choices.items())
        ]
        head = {"object": "chat.completion", "choices": described, "usage": describe_usage(self._reply)}
        return {**self._head, **head, "phalanx": describe_origin(self._reply)}

    def _describe_choice(self, number: int, choice: dict[str, Any], scores: Sequence[TokenScore]) -> dict[str, Any]:
        calls = choice["calls"]
        content = choice["content"].strip() if calls else choice["content"]
        message = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        listed = {"content": _describe_scores(scores, self._names), "refusal": None} if self._body.logprobs else None
        return {"index": number, "message": message, "logprobs": listed, "finish_reason": choice["finish"]}

    async def write_stream(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events, with ids in each of them."""
        for number in range(self._body.n or 1):
            yield self._chunk(number, {"role": "assistant", "content": "", "refusal": None})
        async for event in self._reply.read_events():
            yield self._chunk_of(event)
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._event({"choices": [], "usage": describe_usage(self._reply)} | self._origin())
        yield "data: [DONE]\n\n"

    def _chunk_of(self, event: ReplyEvent) -> str:
        if isinstance(event, TextPiece):
            scores = {"content": _describe_scores(event.scores, self._names)} if self._body.logprobs else None
            return self._chunk(event.choice, {"content": event.text}, logprobs=scores)
        if isinstance(event, CallPiece):
            place = self._num_calls.get(event.choice, 0)
            self._num_calls[event.choice] = place + 1
            return self._chunk(event.choice, {"tool_calls": [{"index": place, **describe_call(event.call)}]})
        return self._finish_chunk(event)

    def _finish_chunk(self, end: ReplyEnd) -> str:
        return self._chunk(end.choice, {}, finish=FINISH.get(end.finish, end.finish))

    def _origin(self) -> dict[str, Any]:
        return {"phalanx": describe_origin(self._reply)}

    def _chunk(
        self, number: int, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> str:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        extra = self._origin() if finish is not None else {}
        return self._event({"choices": [choice]} | extra)

    def _event(self, content: dict[str, Any]) -> str:
        return f"data: {json.dumps({**self._head, 'object': 'chat.completion.chunk', **content})}\n\n"
