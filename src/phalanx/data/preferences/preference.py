"""A preference, in one strict form, whatever shape it came in."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from pydantic import ValidationError, model_validator

from phalanx.config import StrictModel
from phalanx.data.chat.conversation import ChatMessage, Conversation, conversation_of
from phalanx.data.chat.settings import PreferenceShape
from phalanx.data.sources.jsonl import keys_of
from phalanx.errors import DataError

_TURN = re.compile(r"\n\n(Human|Assistant):")
_NAMES = ("chosen", "rejected")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}
Messages = tuple[ChatMessage, ...]


class JudgedAnswer(StrictModel):
    """What follows a prompt.

    Attributes:
        text: Plain text; the assistant's message where the prompt is a conversation.
        messages: In place of it, messages of the assistant, with results of tools between them.
    """

    text: str = ""
    messages: tuple[ChatMessage, ...] = ()

    @property
    def plain(self) -> str:
        """Its text, or that of its last message."""
        return self.messages[-1].text if self.messages else self.text

    @property
    def as_messages(self) -> tuple[ChatMessage, ...]:
        """Its messages, or its text as one."""
        return self.messages or (ChatMessage(role="assistant", content=self.text),)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is said, called or thought."""
        return self.messages[-1].says_nothing if self.messages else not self.text.strip()


class Preference(StrictModel):
    """One prompt with its answers.

    Attributes:
        text: The prompt, where it is plain text.
        messages: The prompt, where it is a conversation.
        tools: That the assistant may call, as JSON schemas.
        answers: The better and the worse one; or a single one.
        margin: Difference in score by which the first is better.
        wanted: Whether a single answer is wanted.
    """

    text: str = ""
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    answers: tuple[JudgedAnswer, ...]
    margin: float = 0.0
    wanted: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.messages and not self.text:
            raise ValueError("the prompt is empty")
        if self.messages and self.messages[-1].role == "assistant":
            raise ValueError("the prompt ends with the assistant's message, and the answer is to follow it")
        empty = [number for number, answer in enumerate(self.answers) if answer.is_empty]
        if empty:
            raise ValueError(f"the {_NAMES[empty[0]] if len(self.answers) > 1 else 'only'} answer is empty")
        said = [answer.as_messages for answer in self.answers]
        if len(said) > 1 and said[0] == said[1]:
            raise ValueError("both answers are the same, and neither is better")
        if any(message.weight not in (0.0, 1.0) for messages in said for message in messages):
            raise ValueError("an answer has a weight other than 0 and 1, and objectives of preferences have none")
        if not math.isfinite(self.margin):
            raise ValueError("margin is no finite number")
        return self

    @property
    def prompt_key(self) -> str:
        """What is equal for equal prompts."""
        if not self.messages:
            return self.text
        plain = [[one.role, one.content] for one in self.messages]
        told = [one.for_template() for one in self.messages]
        # as it was before prompts had more than roles and texts, so that the same ones are held out
        is_plain = not self.tools and all(one.keys() == {"role", "content"} for one in told)
        return json.dumps(plain if is_plain else [told, list(self.tools)])


def preference_of(found: Mapping[str, Any], shape: PreferenceShape, ignore: Collection[str] = ()) -> Preference:
    """Read a preference out of one object.

    Args:
        ignore: Fields of a message that are not looked at.

    Raises:
        DataError: Describes the fault; the caller knows file and line.
    """
    if found.get("weight") not in (None, 1):
        raise DataError("field 'weight': objectives of preferences have no weight; take it out, or the line")
    return checked_preference(_SHAPES[shape](found, ignore))


def checked_preference(plain: Mapping[str, Any]) -> Preference:
    """Read a preference of this form's own fields.

    Raises:
        DataError: Describes the fault.
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


def _pair(found: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    margin = found.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise DataError(f"field 'margin' holds {margin!r:.40}, expected a number")
    return {**_sides(found, ("chosen", "rejected"), ignore), "margin": float(margin)}


def _labelled(found: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    label = found.get("label")
    if not isinstance(label, bool):
        raise DataError(f"field 'label' holds {label!r:.40}, expected true or false: whether the completion is wanted")
    if "prompt" not in found and isinstance(found.get("completion"), str):
        raise _lacks(found, "prompt")
    return {**_sides(found, ("completion",), ignore), "wanted": label}


def _sides(found: Mapping[str, Any], names: Sequence[str], ignore: Collection[str]) -> dict[str, Any]:
    """Return the prompt and the answers of one or two sides, each an answer or a whole conversation."""
    values = [found.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str | list):
            raise _lacks(found, name)
    prompt = found.get("prompt")
    if all(isinstance(value, str) for value in values):
        if prompt is None:
            raise DataError("has no field 'prompt', and its sides do not begin with the same messages")
        answers = [{"text": value} for value in values]
        if isinstance(prompt, str):
            return {"text": prompt, "answers": answers}
        read = _read(prompt, "prompt", found, ignore)
        return {"messages": _plain(read.messages), "tools": list(read.tools), "answers": answers}
    sides, tools = _conversations(found, names, ignore)
    before, rests = _cut(prompt, sides, found, ignore)
    for name, rest in zip(names, rests, strict=True):
        _check_answer(rest, name)
    return {"messages": _plain(before), "tools": tools, "answers": [{"messages": _plain(rest)} for rest in rests]}


def _conversations(
    found: Mapping[str, Any], names: Sequence[str], ignore: Collection[str]
) -> tuple[list[Messages], list[dict[str, Any]]]:
    """Read the messages of each side, and the tools."""
    sides, tools = [], []
    for name in names:
        value = found[name]
        whole = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
        read = _read(whole, name, found, ignore)
        last = read.messages[-1].role
        if last != "assistant":
            raise DataError(f"field {name!r} ends with a message of {last}, expected the assistant's")
        sides.append(read.messages)
        tools = list(read.tools)
    return sides, tools


def _cut(
    prompt: Any, sides: Sequence[Messages], found: Mapping[str, Any], ignore: Collection[str]
) -> tuple[Messages, list[Messages]]:
    """Return the messages that all sides answer, and the answer of each side.

    Raises:
        DataError: The sides do not share them, or they are others than the line's prompt.
    """
    given: Messages = ()
    if isinstance(prompt, list):
        given = _read(prompt, "prompt", found, ignore).messages
        sides = [_behind(given, side) for side in sides]
    shared = _shared(sides)
    rests = [side[len(shared) :] for side in sides]
    if isinstance(prompt, str):
        asked = [one.text.strip() for one in shared if one.role == "user"]
        if shared and prompt.strip() not in (asked[:1] + asked[-1:]):
            raise DataError("its sides begin with another question than field 'prompt' holds; leave the line out")
        return shared or _read([{"role": "user", "content": prompt}], "prompt", found, ignore).messages, rests
    if prompt is not None and not given:
        raise DataError(f"field 'prompt' holds a JSON {type(prompt).__name__}, expected text or a list of messages")
    if not given and not shared:
        raise DataError("has no field 'prompt', and its sides do not begin with the same messages")
    return (*given, *shared), rests


def _behind(prompt: Messages, side: Messages) -> Messages:
    """Return a side's messages behind the prompt, which it may repeat, with its system text or without."""
    for known in (prompt, prompt[1:] if prompt[0].role == "system" else prompt):
        if known and _are_same(side[: len(known)], known):
            return side[len(known) :]
    if side[0].role != "assistant":
        raise DataError("its sides begin with other messages than field 'prompt' holds; leave the line out")
    return side


def _shared(sides: Sequence[Messages]) -> Messages:
    """Return the common beginning of all sides before their answers; empty where a side is an answer alone."""
    first, most = sides[0], min(len(side) for side in sides) - 1
    if most < 0:
        raise DataError("a side has nothing behind field 'prompt'; leave the line out")
    is_shared = [all(_are_same(side[at : at + 1], first[at : at + 1]) for side in sides) for at in range(most)]
    end = is_shared.index(False) if False in is_shared else most
    if len(sides) == 1:
        # one side alone: all that stands before its last answer
        end = max((at for at in range(most) if first[at].role == "user"), default=-1) + 1
    while end and first[end - 1].role == "assistant":
        end -= 1
    if any(side[end].role != "assistant" for side in sides):
        raise DataError("the prompt is not shared: its sides differ before the assistant answers; leave the line out")
    return first[:end]


def _check_answer(messages: Messages, name: str) -> None:
    others = [one.role for one in messages if one.role not in ("assistant", "tool")]
    if others:
        raise DataError(
            f"field {name!r} has a message of {others[0]} behind the first answer that differs; cut the sides there"
        )


def _are_same(some: Messages, others: Messages) -> bool:
    """Return whether a template sees the same; weights count for answers alone."""
    return [one.for_template() for one in some] == [one.for_template() for one in others]


def _plain(messages: Messages) -> list[dict[str, Any]]:
    return [one.model_dump(mode="json") for one in messages]


def _read(value: Any, name: str, found: Mapping[str, Any], ignore: Collection[str]) -> Conversation:
    """Read messages as every conversation is read, with the tools and the system text of the line."""
    if not isinstance(value, list):
        raise DataError(f"field {name!r} holds a JSON {type(value).__name__}, expected text or a list of messages")
    is_answer = bool(value) and isinstance(value[0], dict) and value[0].get("role") == "assistant"
    beside = ("tools",) if is_answer else ("tools", "system")
    try:
        return conversation_of({"messages": value, **{key: found.get(key) for key in beside}}, "messages", ignore)
    except DataError as exc:
        raise DataError(f"field {name!r}: {exc}") from exc


def _transcripts(found: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """Cut two transcripts before the last answer."""
    del ignore
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
    return {"messages": turns, "answers": [{"text": answer} for _, answer in cut]}


def _lacks(found: Mapping[str, Any], name: str) -> DataError:
    keys = keys_of(dict(found))
    return DataError(f"has no field {name!r} with text or messages; its fields are: {keys}; set `shape`")


_SHAPES: Mapping[PreferenceShape, Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]]] = {
    "pairs": _pair,
    "hh": _transcripts,
    "labelled": _labelled,
}
