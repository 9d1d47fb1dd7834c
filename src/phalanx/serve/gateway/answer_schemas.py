"""Answers of engines: named and typed fields alone, of which filters read every free text."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{0,100}\z")]
"""An id or the name of a kind: no room for a text."""
FreeText = Annotated[str, Field(max_length=16 * 1024 * 1024)]
_Index = Annotated[int, Field(ge=0, lt=1024)]
_Count = Annotated[int, Field(ge=0, le=2**53)]
_Token = Annotated[str, Field(max_length=1000)]
_Scores = dict[_Token, float]


class AnswerPart(BaseModel):
    """A part of an answer; fields that the protocol does not know are left out."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class WholePart(AnswerPart):
    """An answer, or a part that comes alone."""

    error: Any = None
    model: Any = None
    usage: Any = None
    phalanx: Any = None


class _Function(AnswerPart):
    name: FreeText | None = None
    arguments: FreeText | None = None


class _Call(AnswerPart):
    index: _Index | None = None
    id: Word | None = None
    type: Word | None = None
    function: _Function | None = None


class _Message(AnswerPart):
    role: Word | None = None
    content: FreeText | None = None
    refusal: FreeText | None = None
    reasoning_content: FreeText | None = None
    reasoning: FreeText | None = None
    tool_calls: Annotated[list[_Call], Field(max_length=128)] | None = None


class _OtherToken(AnswerPart):
    token: _Token
    logprob: float


class _ScoredToken(_OtherToken):
    bytes: Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(max_length=4000)] | None = None
    top_logprobs: Annotated[list[_OtherToken], Field(max_length=20)] = []


class _Logprobs(AnswerPart):
    """Of a chat the first field, of completions the others."""

    content: list[_ScoredToken] | None = None
    tokens: list[_Token] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[_Scores | None] | None = None
    text_offset: list[int] | None = None


class _Choice(AnswerPart):
    index: _Index = 0
    message: _Message | None = None
    delta: _Message | None = None
    text: FreeText | None = None
    finish_reason: Word | None = None
    logprobs: _Logprobs | None = None


class _Note(AnswerPart):
    filter: Word
    kind: Word
    action: Annotated[str, Field(pattern=r"^[a-z ]{1,20}\z")]
    count: _Count
    first: _Count


_Mark = Literal[
    "gumbel",
    "bias",
    "no (off)",
    "no (caller)",
    "no (greedy)",
    "no (refused by a filter)",
    "no (engine behind a gateway)",
]
"""All that `TokenMark` and filters say: a longer list would be room for a text."""


class EngineOrigin(AnswerPart):
    """What an engine that is a server of this program says of its answer."""

    model_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")] | None = None
    marked: Annotated[list[_Mark], Field(max_length=64)] | None = None
    filters: Annotated[list[_Note], Field(max_length=256)] | None = None
    refused_by: Annotated[list[Word], Field(max_length=64)] | None = None


class EngineAnswer(WholePart):
    """A whole answer or a part of a stream by the routes of OpenAI.

    Without ``system_fingerprint``, by which an engine tells its version.
    """

    id: Word | None = None
    object: Word | None = None
    created: _Count | None = None
    choices: list[_Choice] | None = None


class _Vector(AnswerPart):
    object: Word = "embedding"
    index: Annotated[int, Field(ge=0, lt=1_000_000)] = 0
    embedding: list[float] | Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]*\z")]


class Vectors(WholePart):
    """An answer of ``/v1/embeddings``."""

    object: Word | None = None
    data: list[_Vector]


class _Block(AnswerPart):
    type: Literal["text", "thinking", "tool_use", "text_delta", "thinking_delta", "input_json_delta"]
    text: FreeText | None = None
    thinking: FreeText | None = None
    partial_json: FreeText | None = None
    id: Word | None = None
    name: Word | None = None
    input: dict[str, Any] | None = None


class _End(AnswerPart):
    stop_reason: Word | None = None
    stop_sequence: FreeText | None = None


class EngineMessage(WholePart, _End):
    """A whole answer of ``/v1/messages``."""

    id: Word | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    content: Annotated[list[_Block], Field(max_length=1024)]


class _FirstMessage(EngineMessage):
    error: None = None
    phalanx: None = None
    content: Annotated[list[_Block], Field(max_length=0)] = []


class EngineEvent(WholePart):
    """An event of a stream of ``/v1/messages``."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]
    index: _Index | None = None
    message: _FirstMessage | None = None
    content_block: _Block | None = None
    delta: _Block | _End | None = None
