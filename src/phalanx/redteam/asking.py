"""Chats with the attacked model: by its weights, or over an address that speaks the usual chat completions."""

import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from pydantic import ValidationError

from phalanx.data.chat import ChatMessage
from phalanx.errors import InputError, RewardError, TransportError
from phalanx.rewards.server import ServedModel, ServerSettings
from phalanx.serve.sampling import SamplingRule
from phalanx.serve.text_model import TextModel

_TIMEOUT_S = 120.0
_DOOR_CODES = (400, 403, 422)
"""Codes by which a filter at the door refuses a prompt."""


@dataclass(frozen=True)
class ChatReply:
    """An answer; hostile data.

    Attributes:
        finish: ``length`` where it was cut at the allowed number of tokens; ``refused`` where the server refused.
    """

    text: str
    finish: Literal["stop", "length", "refused"]


class Asks(Protocol):
    """Answers chats."""

    def answer_chat(self, messages: Sequence[ChatMessage], max_tokens: int) -> ChatReply:
        """Return the answer to a chat, the likeliest tokens only."""
        ...


@dataclass(frozen=True)
class LocalAsks:
    """The weights, asked in this process."""

    model: TextModel

    def answer_chat(self, messages: Sequence[ChatMessage], max_tokens: int) -> ChatReply:
        """Return the model's likeliest answer."""
        sampling = SamplingRule(max_new_tokens=max_tokens, temperature=0.0)
        completion = self.model.complete_prompt(self.model.chat_prompt(messages), sampling)
        return ChatReply(completion.text, completion.finish)


class EndpointAsks:
    """A server, asked by ``/v1/chat/completions``; answers are bounded in size and time, and never run.

    Args:
        url: Its base address, with or without ``/v1``.
    """

    def __init__(self, url: str, name: str = "default", key_file: Path | None = None) -> None:
        address = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        try:
            server = ServerSettings(url=address, model=name, key_file=key_file)
        except ValidationError as exc:
            raise InputError(f"{url}: expected an address that begins with http:// or https://, and a name") from exc
        self._url, self._server = url, ServedModel(server, _TIMEOUT_S)

    def answer_chat(self, messages: Sequence[ChatMessage], max_tokens: int) -> ChatReply:
        """Return the server's answer; one that its filters refuse counts as refused.

        Raises:
            TransportError: It does not answer, or with something else than a chat completion; or it refuses a greeting
                in the same roles too, so that its refusal says nothing of the prompt.
        """
        try:
            return self._ask_server(messages, max_tokens)
        except RewardError as exc:
            if not _is_door_refusal(exc):
                raise TransportError(str(exc)) from exc
        # a wrong name, key or template refuses everything, which is no defence
        try:
            self._ask_server([ChatMessage(role=message.role, content="Hello") for message in messages], max_tokens)
        except RewardError as exc:
            raise TransportError(f"{exc}; a greeting is refused as well: check --model, --key-file and roles") from exc
        return ChatReply("", "refused")

    def _ask_server(self, messages: Sequence[ChatMessage], max_tokens: int) -> ChatReply:
        chat = {"messages": [message.for_template() for message in messages], "max_tokens": max_tokens}
        answer = self._server.post_json("chat/completions", {**chat, "temperature": 0})
        try:
            choice = answer["choices"][0]
            text, finish = choice["message"]["content"] or "", choice.get("finish_reason")
        except (KeyError, IndexError, TypeError, AttributeError) as exc:
            raise TransportError(f"{self._url}: answered no chat completion; is it the address of a server?") from exc
        if finish == "content_filter" or not isinstance(text, str):
            return ChatReply("", "refused")
        return ChatReply(text, "length" if finish == "length" else "stop")


def _is_door_refusal(exc: RewardError) -> bool:
    cause = exc.__cause__
    return isinstance(cause, urllib.error.HTTPError) and cause.code in _DOOR_CODES
