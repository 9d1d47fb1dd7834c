"""The turns of a dialogue, out of the shapes of JSON objects that are about."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.data.sources.jsonl import keys_of
from phalanx.errors import DataError

Shape = Literal["auto", "sharegpt", "messages", "alpaca", "prompt"]
"""Of an object that holds a dialogue; "auto" looks at each."""

_MAX_TURNS = 10_000
_ROLE_CHARACTERS = 40
# what ShareGPT calls them
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}


@dataclass(frozen=True)
class DialogueTurn:
    """What one side says at a time.

    Attributes:
        others: The other fields of the turn, as they stand there.
        has_content: Whether there is a field for the text, which may hold null.
    """

    role: str
    content: str | None
    others: Mapping[str, Any] = field(default_factory=dict)
    has_content: bool = True


def turns_of(record: Mapping[str, Any], shape: Shape) -> Iterator[DialogueTurn]:
    """Give the turns of one object."""
    layout = shape if shape != "auto" else _shape_of(record)
    if layout is None:
        raise DataError(f"is a dialogue of no known shape; its fields are: {keys_of(dict(record))}; set `shape`")
    return _SHAPES[layout](record)


def _shape_of(record: Mapping[str, Any]) -> str | None:
    for key, shape in (
        ("messages", "messages"),
        ("conversations", "sharegpt"),
        ("instruction", "alpaca"),
        ("prompt", "prompt"),
    ):
        if key in record:
            return shape
    return None


def _list_turns(record: Mapping[str, Any], key: str, role: str, content: str) -> Iterator[DialogueTurn]:
    turns = record.get(key)
    if not isinstance(turns, list) or len(turns) > _MAX_TURNS:
        raise DataError(f"field {key!r} holds no list of at most {_MAX_TURNS} turns")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get(role), str):
            raise DataError(f"turn {number} has no text {role!r}")
        name = turn[role].strip()
        if not name or len(name) > _ROLE_CHARACTERS:
            raise DataError(f"turn {number} has no {role!r} of 1 to {_ROLE_CHARACTERS} characters")
        content_text = None if turn.get(content) is None else _content_of(turn[content], f"turn {number}")
        others = {name: value for name, value in turn.items() if name not in (role, content)}
        yield DialogueTurn(_ROLES.get(name.lower(), name), content_text, others, content in turn)


def _content_of(value: Any, where: str) -> str:
    """The text of a turn; of a list of parts, all of them text, their texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in value):
        return "".join(part["text"] for part in value)
    raise DataError(f"{where} holds something else than text")


def _message_turns(record: Mapping[str, Any]) -> Iterator[DialogueTurn]:
    return _list_turns(record, "messages", "role", "content")


def _sharegpt_turns(record: Mapping[str, Any]) -> Iterator[DialogueTurn]:
    turns = record.get("conversations")
    if isinstance(turns, list) and turns and isinstance(turns[0], dict) and "role" in turns[0]:
        # the list of one shape with the turns of the other is about as well
        return _list_turns(record, "conversations", "role", "content")
    return _list_turns(record, "conversations", "from", "value")


def _alpaca_turns(record: Mapping[str, Any]) -> Iterator[DialogueTurn]:
    asked = _content_of(record.get("instruction"), "field 'instruction'")
    field_input = _content_of(record.get("input") or "", "field 'input'")
    if isinstance(record.get("system"), str) and record["system"]:
        yield DialogueTurn("system", record["system"])
    yield DialogueTurn("user", f"{asked}\n\n{field_input}" if field_input else asked)
    yield DialogueTurn("assistant", _content_of(record.get("output"), "field 'output'"))


def _prompt_turns(record: Mapping[str, Any]) -> Iterator[DialogueTurn]:
    answer = record["completion"] if "completion" in record else record.get("response")
    yield DialogueTurn("user", _content_of(record.get("prompt"), "field 'prompt'"))
    yield DialogueTurn("assistant", _content_of(answer, "field 'completion'"))


_SHAPES: Mapping[str, Callable[[Mapping[str, Any]], Iterator[DialogueTurn]]] = {
    "sharegpt": _sharegpt_turns,
    "messages": _message_turns,
    "alpaca": _alpaca_turns,
    "prompt": _prompt_turns,
}
