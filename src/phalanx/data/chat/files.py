"""Conversations out of JSON lines, as documents that have the one canonical form of each as their text."""

import json
from collections.abc import Iterator
from typing import Any

from phalanx.data.chat.conversation import Conversation, checked_conversation, parse_conversation
from phalanx.data.chat.settings import ConversationSource, Policy
from phalanx.data.sources.jsonl import JsonLines
from phalanx.data.sources.records import RawRecord, RecordClaims, document_of
from phalanx.data.sources.source import BrokenRecord, Document
from phalanx.errors import DataError


class ConversationFiles(JsonLines):
    """One conversation per line; other lines are an error, or are left out and counted."""

    def __init__(self, config: ConversationSource, broken: Policy) -> None:
        super().__init__(config, (".jsonl",))
        self._config, self._broken = config, broken
        self.dropped: list[BrokenRecord] = []

    def documents(self) -> Iterator[Document]:
        """As `RecordFiles.documents`; broken lines are left out and counted where the run file says so."""
        if self._broken == "refuse":
            yield from super().documents()
            return
        self.dropped = []
        for file in self.files:
            for example in self.read_file_records(file):
                if isinstance(example, Document):
                    yield example
                elif not example.is_unsupported:
                    self.dropped.append(example)

    def _document_from_object(self, record: RawRecord, content: dict[str, Any]) -> Document:
        try:
            conversation = parse_conversation(content, self._config.shape, self._config.ignore)
            conversation.check_learnable()
        except DataError as exc:
            raise DataError(f"{record.name}: {exc}") from exc
        return document_of(record, conversation_to_text(conversation), RecordClaims())


def conversation_to_text(conversation: Conversation) -> str:
    """Return the canonical JSON of a conversation: equal ones have equal texts."""
    return conversation.model_dump_json(exclude_defaults=True)


def conversation_from_text(text: str) -> Conversation:
    """Read it back."""
    return checked_conversation(json.loads(text))
