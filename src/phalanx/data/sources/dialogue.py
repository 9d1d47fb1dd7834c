"""Dialogues in JSON lines, in the shapes that are about; a template makes them text."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from phalanx.data.sources.columns import ColumnSettings, said_in
from phalanx.data.sources.jsonl import JsonLines, keys_of
from phalanx.data.sources.records import RawRecord, RecordClaims, document_of
from phalanx.data.sources.source import Document
from phalanx.errors import DataError

_MOST_TURNS = 10_000
_ROLE_CHARACTERS = 40
_TOLD_ROLES = 64
# what ShareGPT calls them
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


class DialogueConfig(ColumnSettings):
    """Dialogues, one JSON object a line, a file or a directory of ``*.jsonl`` (also ``.gz``, ``.zst``).

    Attributes:
        shape: Of the objects; "auto" looks at each.
        turn: The text of one turn, with ``{role}`` and ``{content}``.
        between: What stands between two turns.
    """

    kind: Literal["dialogue"] = "dialogue"
    shape: Literal["auto", "sharegpt", "messages", "alpaca", "prompt"] = "auto"
    turn: str = Field(default="{role}: {content}", min_length=1)
    between: str = "\n\n"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "{content}" not in self.turn:
            raise ValueError("turn: lacks {content}; write where the text of a turn goes")
        return self


@dataclass(frozen=True)
class DialogueTurn:
    """What one side says at a time."""

    role: str
    content: str


class DialogueFiles(JsonLines):
    """One document per line: its turns by the template, roles kept in its fields."""

    def __init__(self, config: DialogueConfig) -> None:
        super().__init__(config, (".jsonl",))
        self._config = config

    def _of_object(self, record: RawRecord, found: dict[str, Any]) -> Document:
        try:
            turns = list(self._turns(found))
        except DataError as exc:
            raise DataError(f"{record.name}: {exc}") from exc
        if not turns:
            raise DataError(f"{record.name}: a dialogue without a turn")
        text = self._config.between.join(self._rendered(turn) for turn in turns)
        said = said_in(found, self._config)
        roles = ",".join(turn.role for turn in turns[:_TOLD_ROLES])
        fields = {**said.fields, "turns": len(turns), "roles": roles}
        return document_of(record, text, RecordClaims(said.url, said.fetched_at, fields=fields))

    def _turns(self, found: dict[str, Any]) -> Iterator[DialogueTurn]:
        shape = self._config.shape if self._config.shape != "auto" else _shape_of(found)
        if shape is None:
            raise DataError(f"is a dialogue of no known shape; its fields are: {keys_of(found)}; set `shape`")
        return _SHAPES[shape](found)

    def _rendered(self, turn: DialogueTurn) -> str:
        # the role first: a text that holds {role} stays as it is
        before, _, after = self._config.turn.partition("{content}")
        return before.replace("{role}", turn.role) + turn.content + after.replace("{role}", turn.role)


def _shape_of(found: Mapping[str, Any]) -> str | None:
    for key, shape in (
        ("messages", "messages"),
        ("conversations", "sharegpt"),
        ("instruction", "alpaca"),
        ("prompt", "prompt"),
    ):
        if key in found:
            return shape
    return None


def _listed(found: Mapping[str, Any], key: str, role: str, content: str) -> Iterator[DialogueTurn]:
    turns = found.get(key)
    if not isinstance(turns, list) or len(turns) > _MOST_TURNS:
        raise DataError(f"field {key!r} holds no list of at most {_MOST_TURNS} turns")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get(role), str):
            raise DataError(f"turn {number} has no text {role!r}")
        name = turn[role].strip()
        if not name or len(name) > _ROLE_CHARACTERS:
            raise DataError(f"turn {number} has no {role!r} of 1 to {_ROLE_CHARACTERS} characters")
        yield DialogueTurn(_ROLES.get(name.lower(), name), _content_of(turn.get(content), f"turn {number}"))


def _content_of(value: Any, where: str) -> str:
    """The text of a turn; of a list of parts, all of them text, their texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    raise DataError(f"{where} holds something else than text")


def _messages(found: Mapping[str, Any]) -> Iterator[DialogueTurn]:
    return _listed(found, "messages", "role", "content")


def _sharegpt(found: Mapping[str, Any]) -> Iterator[DialogueTurn]:
    turns = found.get("conversations")
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]:
        # the list of one shape with the turns of the other is about as well
        return _listed(found, "conversations", "role", "content")
    return _listed(found, "conversations", "from", "value")


def _alpaca(found: Mapping[str, Any]) -> Iterator[DialogueTurn]:
    asked = _content_of(found.get("instruction"), "field 'instruction'")
    given = _content_of(found.get("input") or "", "field 'input'")
    if isinstance(found.get("system"), str) and found["system"]:
        yield DialogueTurn("system", found["system"])
    yield DialogueTurn("user", f"{asked}\n\n{given}" if given else asked)
    yield DialogueTurn("assistant", _content_of(found.get("output"), "field 'output'"))


def _prompt(found: Mapping[str, Any]) -> Iterator[DialogueTurn]:
    answer = found["completion"] if "completion" in found else found.get("response")
    yield DialogueTurn("user", _content_of(found.get("prompt"), "field 'prompt'"))
    yield DialogueTurn("assistant", _content_of(answer, "field 'completion'"))


_SHAPES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[DialogueTurn]]] = {
    "sharegpt": _sharegpt,
    "messages": _messages,
    "alpaca": _alpaca,
    "prompt": _prompt,
}
