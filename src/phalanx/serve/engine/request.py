"""The internal request that every protocol is translated to, and the events that answer it."""

import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.data.chat import ChatMessage
from phalanx.errors import DataError, TransportError

MAX_CHOICES = 8
MAX_TOP_LOGPROBS = 20
MAX_TOKENS = 1 << 20
MAX_STOPS = 16
MAX_GRAMMAR_CHARACTERS = 1 << 16

TokenId = Annotated[int, Field(ge=0, lt=1 << 24)]
FinishReason = Literal["stop", "length", "stop_sequence"]


class BadRequestError(DataError):
    """A request asks for what cannot be done; the message goes to the client.

    Attributes:
        parameter: The field that is at fault, where it is one.
    """

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class EngineBusyError(TransportError):
    """The queue is full, or the engine is about to end; ask again later."""


class SamplingSettings(StrictModel):
    """The rule by which the next token is chosen.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draw from so many likeliest tokens; 0 for all.
        top_p: Draw from the likeliest tokens that have this share together.
        frequency_penalty: Taken from a token's logit for each time that it was written.
        presence_penalty: Taken from a token's logit once it was written.
        repetition_penalty: Above 1 makes tokens of prompt and text less likely (Keskar et al. 2019).
        logit_bias: Added to the logits of single tokens.
        seed: Two requests of equal seed, settings and prompt draw with the same noise.
    """

    temperature: float = Field(default=1.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0, lt=1 << 24)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=10.0, allow_inf_nan=False)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field(default={}, max_length=1024)
    seed: int = Field(default_factory=lambda: secrets.randbits(63), ge=0, lt=1 << 63)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the likeliest token of the bare logits is taken."""
        return self.temperature == 0.0 and not self.has_penalties and not self.logit_bias

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were written count."""
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)


class Grammar(StrictModel):
    """A form that the text must have.

    Attributes:
        kind: Language of `source`; ``json_object`` takes any object.
    """

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    source: str = Field(default="", max_length=MAX_GRAMMAR_CHARACTERS)


class Tool(StrictModel):
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of its arguments.
    """

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str = Field(default="", max_length=8192)
    parameters: dict[str, Any] = Field(default={})

    def for_template(self) -> dict[str, Any]:
        """Return it in the form that chat templates are written for."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class GenerationRequest(StrictModel):
    """What a client asks for, whatever protocol it speaks.

    Attributes:
        model: Id of a served model or adapter.
        owner: Owner of the key; prefixes are reused inside it only.
        cache_salt: Prefixes are reused by requests with the same one only.
        reuses_prompt: False neither reuses nor stores a prefix.
        text: A text to go on with.
        tool_choice: ``none``, ``auto``, ``required``, or the name of the tool that must be called.
        max_tokens: Bound of each choice; None takes the server's default.
        logprobs: None for no log-probabilities, else how many alternatives at each token.
        echo: Score the prompt's tokens too.
        wants_mark: False asks for text without a mark, which `may_skip_mark` and the server's policy must allow.
    """

    model: str = Field(min_length=1, max_length=256)
    owner: str = Field(max_length=256)
    cache_salt: str = Field(default="", max_length=128)
    reuses_prompt: bool = True
    text: str | None = None
    ids: tuple[TokenId, ...] | None = Field(default=None, max_length=MAX_TOKENS)
    messages: tuple[ChatMessage, ...] | None = None
    tools: tuple[Tool, ...] = Field(default=(), max_length=128)
    tool_choice: str = Field(default="auto", max_length=64)
    sampling: SamplingSettings = SamplingSettings()
    max_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    stop: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=MAX_STOPS)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool = False
    wants_mark: bool = True
    may_skip_mark: bool = False
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if sum(part is not None for part in (self.text, self.ids, self.messages)) != 1:
            raise ValueError("expected one of a text, its tokens and messages")
        return self


@dataclass(frozen=True)
class TokenScore:
    """A token with its log-probability.

    Attributes:
        top: The likeliest tokens at this place, by falling log-probability.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptRead:
    """The prompt was read; the first event of an answer.

    Attributes:
        reused_tokens: Tokens that were in the owner's cache.
        scores: Scores that `echo` asks for; None at the first token, which nothing comes before.
        text: Number by which the log speaks of the text apart from its request; None where it does not.
    """

    num_tokens: int
    reused_tokens: int
    scores: tuple[TokenScore | None, ...] = ()
    text: int | None = None


@dataclass(frozen=True)
class TextPiece:
    """A piece of the text of one choice.

    Attributes:
        scores: Tokens that are complete with this piece, if log-probabilities were asked for.
        num_tokens: Tokens written for this choice so far.
    """

    choice: int
    text: str
    num_tokens: int
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class ChoiceEnd:
    """The text of one choice is over.

    Attributes:
        num_tokens: Tokens that were written, the end of text included.
        stop: The stop sequence that ended it.
        mark: ``gumbel``, ``bias`` or ``no (reason)``.
    """

    choice: int
    finish: FinishReason
    num_tokens: int
    stop: str | None = None
    mark: str = "no (off)"


Event = PromptRead | TextPiece | ChoiceEnd
