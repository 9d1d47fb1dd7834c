"""A preference, in one strict form, whatever shape it came in."""

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Self

from pydantic import ValidationError, model_validator

from phalanx.config import StrictModel
from phalanx.data.chat.conversation import ChatMessage, conversation_of
from phalanx.data.chat.settings import PreferenceShape
from phalanx.data.sources.jsonl import keys_of
from phalanx.errors import DataError

_TURN = re.compile(r"\n\n(Human|Assistant):")
_NAMES = ("chosen", "rejected")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


class Preference(StrictModel):
    """One prompt with its answers.

    Attributes:
        text: The prompt, where it is plain text.
        messages: The prompt, where it is a conversation.
        answers: The better and the worse one; or a single one.
        margin: By how much the first is better, in the units of a score.
        wanted: Whether a single answer is wanted.
    """

    text: str = ""
    messages: tuple[ChatMessage, ...] = ()
    answers: tuple[str, ...]
    margin: float = 0.0
    wanted: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.messages and not self.text:
            raise ValueError("the prompt is empty")
        if self.messages and self.messages[-1].role == "assistant":
            raise ValueError("the prompt ends with the assistant's message, and the answer is to follow it")
        empty = [number for number, answer in enumerate(self.answers) if not answer.strip()]
        if empty:
            raise ValueError(f"the {_NAMES[empty[0]] if len(self.answers) > 1 else 'only'} answer is empty")
        if len(set(self.answers)) < len(self.answers):
            raise ValueError("both answers are the same, and neither is better")
        if not math.isfinite(self.margin):
            raise ValueError("margin is no finite number")
        return self

    @property
    def prompt_key(self) -> str:
        """What is equal for equal prompts."""
        return self.text or json.dumps([[one.role, one.content] for one in self.messages])


def preference_of(found: Mapping[str, Any], shape: PreferenceShape) -> Preference:
    """Read a preference out of one object.

    Raises:
        DataError: Says what is wrong; the caller knows file and line.
    """
    return checked_preference(_SHAPES[shape](found))


def checked_preference(plain: Mapping[str, Any]) -> Preference:
    """Read a preference of this form's own fields.

    Raises:
        DataError: Says what is wrong.
    """
    try:
        return Preference.model_validate_json(json.dumps(plain))
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        told = first["msg"].removeprefix("Value error, ")
        raise DataError(f"{where}: {told}" if where else f"{told}; leave the line out") from exc
    except (ValueError, RecursionError) as exc:
        raise DataError(f"is no preference ({exc})") from exc


def _pair(found: Mapping[str, Any]) -> dict[str, Any]:
    margin = found.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise DataError(f"field 'margin' holds {margin!r:.40}, expected a number")
    sides = [_side(found, name) for name in ("chosen", "rejected")]
    if "prompt" in found:
        prompt = _prompt(found["prompt"])
    elif sides[0][0] and sides[0][0] == sides[1][0]:
        prompt = {"messages": sides[0][0]}
    else:
        raise DataError("has no field 'prompt', and its sides do not begin with the same messages")
    return {**prompt, "answers": [answer for _, answer in sides], "margin": float(margin)}


def _labelled(found: Mapping[str, Any]) -> dict[str, Any]:
    label = found.get("label")
    if not isinstance(label, bool):
        raise DataError(f"field 'label' holds {label!r:.40}, expected true or false: whether the completion is wanted")
    _, answer = _side(found, "completion")
    if "prompt" not in found:
        raise _lacks(found, "prompt")
    return {**_prompt(found["prompt"]), "answers": [answer], "wanted": label}


def _transcripts(found: Mapping[str, Any]) -> dict[str, Any]:
    """Cut two transcripts before the last answer."""
    cut = []
    for name in ("chosen", "rejected"):
        text = found.get(name)
        if not isinstance(text, str):
            raise _lacks(found, name)
        before, mark, answer = text.rpartition("\n\nAssistant:")
        if not mark:
            raise DataError(f"field {name!r} has no answer: no line begins with 'Assistant:'")
        cut.append((before, answer.strip()))
    if cut[0][0] != cut[1][0]:
        raise DataError("the prompt is not shared: the transcripts differ before the last answer; leave the line out")
    begins = [(match.start(), match.end(), match[1]) for match in _TURN.finditer(cut[0][0])]
    ends = [start for start, _, _ in begins[1:]] + [len(cut[0][0])]
    if not begins or begins[0][0] != 0:
        raise DataError("field 'chosen' does not begin with a turn: expected a blank line and 'Human:'")
    turns = [
        {"role": _SPEAKERS[speaker], "content": cut[0][0][behind:end].strip()}
        for (_, behind, speaker), end in zip(begins, ends, strict=True)
    ]
    return {"messages": turns, "answers": [answer for _, answer in cut]}


def _prompt(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"text": value}
    return {"messages": _messages(value, "prompt")}


def _side(found: Mapping[str, Any], name: str) -> tuple[list[dict[str, Any]], str]:
    """The messages before an answer, and the answer."""
    value = found.get(name)
    if isinstance(value, str):
        return [], value
    if value is None:
        raise _lacks(found, name)
    messages = _messages(value, name)
    last = messages[-1]
    if last["role"] != "assistant":
        raise DataError(f"field {name!r} ends with a message of {last['role']}, expected the assistant's")
    return messages[:-1], str(last["content"])


def _messages(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise DataError(f"field {name!r} holds a JSON {type(value).__name__}, expected text or a list of messages")
    try:
        read = conversation_of({"messages": value}, "messages")
    except DataError as exc:
        raise DataError(f"field {name!r}: {exc}") from exc
    return [one.model_dump(mode="json", exclude_defaults=True) | {"content": one.content} for one in read.messages]


def _lacks(found: Mapping[str, Any], name: str) -> DataError:
    keys = keys_of(dict(found))
    return DataError(f"has no field {name!r} with text or messages; its fields are: {keys}; set `shape`")


_SHAPES: Mapping[PreferenceShape, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "pairs": _pair,
    "hh": _transcripts,
    "labelled": _labelled,
}
