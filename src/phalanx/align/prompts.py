"""Prompts that a model is to answer: JSON lines with a prompt or messages, and whatever else belongs to them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.align.writer import user_message
from phalanx.config import canonical_json
from phalanx.data.chat import ChatMessage, parse_conversation
from phalanx.data.sources.files import note_file_read
from phalanx.data.sources.jsonl import parse_object
from phalanx.errors import DataError


@dataclass(frozen=True)
class AskedPrompt:
    """A prompt with its record.

    Attributes:
        where: File and line, for messages.
        chat: The messages, the last of which is not the assistant's.
        record: Whole record of the prompt's file.
    """

    where: str
    chat: tuple[ChatMessage, ...]
    record: Mapping[str, Any]

    @property
    def json_messages(self) -> list[dict[str, Any]]:
        """The chat as JSON lines have it."""
        return [one.for_template() for one in self.chat]

    @property
    def readable_text(self) -> str:
        """The chat as a person reads it; a single message of the user as it is."""
        if len(self.chat) == 1 and self.chat[0].role == "user":
            return self.chat[0].text_content
        return "\n\n".join(f"{message.role}: {message.text_content}" for message in self.chat)


def prompt_of(record: Mapping[str, Any], where: str) -> AskedPrompt:
    """Read one prompt."""
    prompt, messages = record.get("prompt"), record.get("messages")
    # pairs and conversations may be asked again: an answer at the end is not part of what is asked
    if isinstance(prompt, list) and messages is None:
        prompt, messages = None, prompt
    if (prompt is None) == (messages is None):
        raise DataError(f"{where}: expected either prompt or messages").with_facts(code="PHX-I014", file=where)
    if prompt is not None:
        if not isinstance(prompt, str) or not prompt.strip():
            raise DataError(f"{where}: the prompt is empty; write words, or remove the line")
        return AskedPrompt(where, (user_message(prompt),), record)
    try:
        conversation = parse_conversation({**record, "messages": messages}, "messages")
    except DataError as exc:
        raise DataError(f"{where}: {exc}") from exc
    chat = conversation.messages
    if conversation.tools:
        raise DataError(f"{where}: has tools, which are not supported; remove them, or the line").with_facts(
            code="PHX-I014", file=where
        )
    if chat[-1].role == "assistant":
        raise DataError(f"{where}: ends with the assistant's message, but the answer must follow; remove that message")
    return AskedPrompt(where, chat, record)


def read_prompts(path: Path) -> list[AskedPrompt]:
    """Read a file of prompts."""
    return [prompt_of(record, place) for place, record in read_records(path)]


def read_records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Read the objects of a file of JSON lines, each with file and line."""
    try:
        note_file_read(path)
        lines = path.read_bytes().splitlines()
    except OSError as exc:
        raise DataError(f"{path}: cannot be read ({exc.strerror}); give a file of JSON lines").with_facts(
            code="PHX-I011", file=str(path)
        ) from exc
    places = [(f"{path}, line {number}", text) for number, text in enumerate(lines, start=1) if text.strip()]
    if not places:
        raise DataError(f"{path}: has no line; every line is an object").with_facts(code="PHX-I012", file=str(path))
    return [(place, parse_object(text, place)) for place, text in places]


def prompts_digest(prompts: Sequence[AskedPrompt]) -> str:
    """SHA-256 in hex over every prompt with its record."""
    return hashlib.sha256(canonical_json([dict(prompt.record) for prompt in prompts])).hexdigest()
