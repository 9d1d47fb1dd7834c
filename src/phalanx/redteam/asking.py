"""Chats with the attacked model: by its weights, or over an address that speaks the usual chat completions."""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from phalanx.data.chat import ChatMessage
from phalanx.errors import InputError, TransportError
from phalanx.serve.sampling import SamplingRule
from phalanx.serve.text_model import TextModel

_MAX_ANSWER_BYTES = 1 << 20
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Reply:
    """An answer; hostile data.

    Attributes:
        finish: ``length`` where it was cut at the allowed number of tokens; ``refused`` where the server refused.
    """

    text: str
    tokens: int
    finish: Literal["stop", "length", "refused"]


class Asks(Protocol):
    """Answers chats."""

    def answer_chat(self, messages: Sequence[ChatMessage], max_tokens: int) -> Reply:
        """Return the answer to a chat, the likeliest tokens only."""
        ...


@dataclass(frozen=True)
class LocalAsks:
    """The weights, asked in this process."""

    model: TextModel

    def answer_chat(self, messages: Sequence[ChatMessage], max_tokens: int) -> Reply:
        """Return the model's likeliest answer."""
        sampling = SamplingRule(max_new_tokens=max_tokens, temperature=0.0)
        completion = self.model.complete_prompt(self.model.chat_prompt(messages), sampling)
        return Reply(completion.text, completion.tokens, completion.finish)


@dataclass(frozen=True)
class EndpointAsks:
    """A server, asked by ``/v1/chat/completions``; answers are bounded in size and time, and never run.

    Attributes:
        url: Its base address, up to and without ``/v1``.
        name: Name of the model at the server.
        key: Its access key; empty where none is asked for.
    """

    url: str
    name: str = "default"
    key: str = ""

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in ("http", "https"):
            raise InputError(f"{self.url}: expected an address that begins with http:// or https://")

    def answer_chat(self, messages: Sequence[ChatMessage], max_tokens: int) -> Reply:
        """Return the server's answer; one that its filters refuse counts as refused.

        Raises:
            TransportError: It does not answer, or with something else than a chat completion.
        """
        body = {
            "model": self.name,
            "messages": [message.for_template() for message in messages],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        answer = self._post_json(body)
        try:
            choice = answer["choices"][0]
            text, finish = choice["message"]["content"] or "", choice.get("finish_reason")
            tokens = int((answer.get("usage") or {}).get("completion_tokens") or 0)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as exc:
            raise TransportError(f"{self.url}: answered no chat completion; is it the address of a server?") from exc
        if finish == "content_filter" or not isinstance(text, str):
            return Reply("", tokens, "refused")
        return Reply(text, tokens, "length" if finish == "length" else "stop")

    def _post_json(self, body: dict[str, object]) -> Any:
        address = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)  # noqa: S310 - checked above
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as stream:  # noqa: S310
                content = stream.read(_MAX_ANSWER_BYTES + 1)
        except urllib.error.HTTPError as exc:
            if exc.code in (400, 403, 422):
                # a filter at the door is an answer too: it refused
                return {"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}
            raise TransportError(f"{self.url}: answered {exc.code}; see the server's log") from exc
        except (OSError, ValueError) as exc:
            raise TransportError(f"{self.url}: does not answer ({exc}); is the server running?") from exc
        if len(content) > _MAX_ANSWER_BYTES:
            raise TransportError(f"{self.url}: an answer has more than {_MAX_ANSWER_BYTES} bytes")
        try:
            return json.loads(content)
        except ValueError as exc:
            raise TransportError(f"{self.url}: answered no JSON") from exc
