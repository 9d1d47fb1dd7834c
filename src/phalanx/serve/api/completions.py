"""POST /v1/completions."""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from phalanx.serve.access import Caller
from phalanx.serve.api.chat import (
    FINISH,
    ResponseFormat,
    StreamOptions,
    describe_origin,
    describe_usage,
    make_grammar,
    make_sampling,
)
from phalanx.serve.api.fields import (
    CacheFields,
    Choices,
    LogitBias,
    ModelId,
    Penalty,
    Seed,
    Stop,
    Temperature,
    Text,
    TopK,
    TopP,
    make_id,
)
from phalanx.serve.api.service import ModelReply, ReplyEnd
from phalanx.serve.engine import BadRequestError, GenerationRequest, TextPiece, TokenScore
from phalanx.serve.engine.request import MAX_STOPS, MAX_TOKENS, TokenId
from phalanx.serve.engine.text_assembler import TokenNames

_MAX_PROMPTS = 64
_DEFAULT_TOKENS = 16
Ids = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=MAX_TOKENS)]


class CompletionBody(CacheFields):
    """The body of a request; every other field is refused.

    Attributes:
        logprobs: So many alternatives at each token.
    """

    model: ModelId
    prompt: (
        Text
        | Ids
        | Annotated[tuple[Text, ...], Field(min_length=1, max_length=_MAX_PROMPTS)]
        | Annotated[tuple[Ids, ...], Field(min_length=1, max_length=_MAX_PROMPTS)]
    )
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
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
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    seed: Seed | None = None
    suffix: None = None
    mark: bool | None = None
    best_of: Literal[1] | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str, Field(max_length=256)] | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return bool(self.stream)

    def translate(self, caller: Caller) -> list[GenerationRequest]:
        """Return one internal request a prompt."""
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("needs stream=true", "stream_options")
        if self.max_tokens == 0 and not self.echo:
            raise BadRequestError("0 needs echo=true", "max_tokens")
        sampling = make_sampling(self)
        max_tokens = _DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens
        return [
            GenerationRequest(
                model=self.model,
                owner=caller.owner,
                cache_salt=self.cache_salt or "",
                reuses_prompt=self.cache_prompt is not False,
                wants_mark=self.mark is not False,
                may_skip_mark=caller.may_skip_mark,
                text=prompt if isinstance(prompt, str) else None,
                ids=None if isinstance(prompt, str) else prompt,
                sampling=sampling.model_copy(update={"seed": (sampling.seed + number) % (1 << 63)}),
                max_tokens=max_tokens,
                stop=(self.stop,) if isinstance(self.stop, str) else self.stop or (),
                n=self.n or 1,
                logprobs=self.logprobs,
                echo=bool(self.echo) and self.logprobs is not None,
                grammar=make_grammar(self.response_format),
            )
            for number, prompt in enumerate(self._prompts())
        ]

    def _prompts(self) -> list[str | tuple[int, ...]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompts: list[str | tuple[int, ...]] = []
        for part in self.prompt:
            if isinstance(part, int):
                return [tuple(token for token in self.prompt if isinstance(token, int))]
            prompts.append(part)
        return prompts


class CompletionWriter:
    """Writes a reply in the form of the route."""

    def __init__(self, body: CompletionBody, reply: ModelReply, names: TokenNames) -> None:
        self._body, self._reply, self._names = body, reply, names
        self._head = {
            "id": make_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": reply.card.id,
            "system_fingerprint": f"phx_{reply.card.digest[:16]}",
        }

    async def write_whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        num_choices = (self._body.n or 1) * len(self._reply.requests)
        texts, finishes = [""] * num_choices, [""] * num_choices
        scores: list[list[TokenScore]] = [[] for _ in texts]
        async for event in self._reply.read_events():
            if isinstance(event, TextPiece):
                texts[event.choice] += event.text
                scores[event.choice].extend(event.scores)
            elif isinstance(event, ReplyEnd):
                finishes[event.choice] = FINISH.get(event.finish, event.finish)
        choices = []
        for number, (text, finish) in enumerate(zip(texts, finishes, strict=True)):
            echo_text, echo_scores = self._echo_of(number)
            logprobs = self._describe_scores([*echo_scores, *scores[number]])
            choices.append({"index": number, "text": echo_text + text, "logprobs": logprobs, "finish_reason": finish})
        usage = {"choices": choices, "usage": describe_usage(self._reply)}
        return {**self._head, **usage, "phalanx": describe_origin(self._reply)}

    def _echo_of(self, choice: int) -> tuple[str, list[TokenScore | int]]:
        """Return the text of a choice's prompt and its scores; the first token, which has none, as a number."""
        if not self._body.echo:
            return "", []
        number = choice // (self._body.n or 1)
        prompt = self._reply.prompts[number]
        scores = self._reply.reads[number].scores if number < len(self._reply.reads) else ()
        listed: list[TokenScore | int] = [prompt[0] if score is None else score for score in scores]
        text = b"".join(map(self._names.bytes_of, prompt)).decode("utf-8", errors="replace")
        return text, listed

    def _describe_scores(self, scores: Sequence[TokenScore | int], offset: int = 0) -> dict[str, Any] | None:
        if self._body.logprobs is None:
            return None
        described: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for score in scores:
            token = score if isinstance(score, int) else score.token
            text = self._names.text_of(token)
            described["tokens"].append(text)
            described["text_offset"].append(offset)
            offset += len(text)
            if isinstance(score, int):
                described["token_logprobs"].append(None)
                described["top_logprobs"].append(None)
            else:
                described["token_logprobs"].append(score.logprob)
                described["top_logprobs"].append({self._names.text_of(other): value for other, value in score.top})
        return described

    def _text_length(self, scores: Sequence[TokenScore | int]) -> int:
        """Return the length of tokens one by one, by which `text_offset` counts."""
        return sum(len(self._names.text_of(score if isinstance(score, int) else score.token)) for score in scores)

    async def write_stream(self) -> AsyncGenerator[str, None]:
        """Yield server-sent events, with ids in each of them."""
        offsets: dict[int, int] = {}
        async for event in self._reply.read_events():
            if event.choice not in offsets:
                text, scores = self._echo_of(event.choice)
                offsets[event.choice] = self._text_length(scores)
                if text:
                    yield self._chunk(event.choice, text, self._describe_scores(scores), None)
            if isinstance(event, TextPiece):
                listed = self._describe_scores(event.scores, offsets[event.choice])
                offsets[event.choice] += self._text_length(event.scores)
                yield self._chunk(event.choice, event.text, listed, None)
            elif isinstance(event, ReplyEnd):
                yield self._chunk(event.choice, "", None, FINISH.get(event.finish, event.finish))
        if self._body.stream_options is not None and self._body.stream_options.include_usage:
            yield self._event({"choices": [], "usage": describe_usage(self._reply)})
        yield "data: [DONE]\n\n"

    def _chunk(self, number: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> str:
        choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}
        extra = {} if finish is None else {"phalanx": describe_origin(self._reply)}
        return self._event({"choices": [choice]} | extra)

    def _event(self, content: dict[str, Any]) -> str:
        return f"data: {json.dumps({**self._head, **content})}\n\n"
