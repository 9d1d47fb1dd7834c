"""The interface of a model for the loops of this room; `phalanx.serve.ChatWriter` is one."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

from phalanx.config import canonical_json
from phalanx.data.chat import ChatMessage


class Writer(Protocol):
    """A model that answers chats; equal calls have equal answers."""

    @property
    def writer_digest(self) -> str:
        """Of all that the model is."""

    @property
    def sampling_settings(self) -> dict[str, object]:
        """Settings of the draw of tokens."""

    def check_chat(self, chat: Sequence[ChatMessage], /) -> None:
        """Raise `DataError` where a chat cannot be answered."""

    def write_answers(self, chats: Sequence[Sequence[ChatMessage]], seed: int, /) -> list[str]:
        """Answer each chat; empty where there is no answer."""

    def log_probs(self, chat: Sequence[ChatMessage], answers: Sequence[str], /) -> list[float]:
        """Return the log-probability of each answer."""


def assistant_message(text: str) -> ChatMessage:
    """The assistant's message."""
    return ChatMessage(role="assistant", content=text)


def user_message(text: str) -> ChatMessage:
    """The user's message."""
    return ChatMessage(role="user", content=text)


def drawn_seed(seed: int, *place: object) -> int:
    """Return the seed of one draw: a public function of the seed of all and of its place."""
    digest = hashlib.sha256(canonical_json(["phalanx align", seed, *place])).digest()
    return int.from_bytes(digest[:8], "big") >> 1
