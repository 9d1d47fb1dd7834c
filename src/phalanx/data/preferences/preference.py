"""A preference, in one strict form, whatever shape it came in."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

from pydantic import ValidationError, model_validator

from phalanx.config import StrictModel
from phalanx.data.chat.conversation import ChatMessage, Conversation, parse_conversation
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
    def plain_text(self) -> str:
        """Its text, or that of its last message."""
        return self.messages[-1].text_content if self.messages else self.text

    @property
    def as_messages(self) -> tuple[ChatMessage, ...]:
        """Its messages, or its text as one."""
        return self.messages or (ChatMessage(role="assistant", content=self.text),)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is said, called or thought."""
        return self.messages[-1].has_no_content if self.messages else not self.text.strip()


class Preference(StrictModel):
    """One prompt with its answers.

    Attributes:
        text: The prompt, where it is plain text.
        messages: The prompt, where it is a conversation.
        tools: That the assistant may call, as JSON schemas.
        answers: The better and the worse one; or a single one.
        margin: Difference in score by which the first is better.
    """

    text: str = ""
    messages: tuple[ChatMessage, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    answers: tuple[JudgedAnswer, ...]
    margin: float = 0.0
    wanted: bool | None = None

    @model_validator(mode="after")
    def _check_answers(self) -> Self:
        if not self.messages and not self.text:
            raise ValueError("the prompt is empty")
        if self.messages and self.messages[-1].role == "assistant":
            raise ValueError("the prompt ends with the assistant's message, but the answer must follow it")
        empty = [number for number, answer in enumerate(self.answers) if answer.is_empty]
        if empty:
            raise ValueError(f"the {_NAMES[empty[0]] if len(self.answers) > 1 else 'only'} answer is empty")
        answers = [answer.as_messages for answer in self.answers]
        if len(answers) > 1 and answers[0] == answers[1]:
            raise ValueError("both answers are equal, so neither is better")
        if any(message.weight not in (0.0, 1.0) for messages in answers for message in messages):
            raise ValueError(
                "an answer has a weight other than 0 and 1, which objectives of preferences do not support"
            )
        if not math.isfinite(self.margin):
            raise ValueError("margin is not a finite number")
        return self

    @property
    def prompt_key(self) -> str:
        """What is equal for equal prompts."""
        if not self.messages:
            return self.text
        plain = [[message.role, message.content] for message in self.messages]
        messages = [message.for_template() for message in self.messages]
        # as it was before prompts had more than roles and texts, so that the same ones are held out
        is_plain = not self.tools and all(message.keys() == {"role", "content"} for message in messages)
        return json.dumps(plain if is_plain else [messages, list(self.tools)])


def parse_preference(record: Mapping[str, Any], shape: PreferenceShape, ignore: Collection[str] = ()) -> Preference:
    """Read a preference out of one object."""
    if record.get("weight") not in (None, 1):
        raise DataError("field 'weight': objectives of preferences do not support weights; remove it, or the line")
    return checked_preference(_SHAPES[shape](record, ignore))


def checked_preference(plain: Mapping[str, Any]) -> Preference:
    """Read a preference of this form's own fields."""
    try:
        return Preference.model_validate_json(json.dumps(plain))
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        location = ".".join(str(part) for part in first["loc"])
        problem = first["msg"].removeprefix("Value error, ")
        raise DataError(f"{location}: {problem}" if location else f"{problem}; remove the line") from exc
    except (ValueError, RecursionError) as exc:
        raise DataError(f"is not a preference ({exc})") from exc


def _parse_pair(record: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    margin = record.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise DataError(f"field 'margin' holds {margin!r:.40}, expected a number")
    return {**_parse_sides(record, ("chosen", "rejected"), ignore), "margin": float(margin)}


def _parse_labelled(record: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    label = record.get("label")
    if not isinstance(label, bool):
        raise DataError(f"field 'label' holds {label!r:.40}, expected true or false: whether the completion is wanted")
    if "prompt" not in record and isinstance(record.get("completion"), str):
        raise _missing_field_error(record, "prompt")
    return {**_parse_sides(record, ("completion",), ignore), "wanted": label}


def _parse_sides(record: Mapping[str, Any], names: Sequence[str], ignore: Collection[str]) -> dict[str, Any]:
    """Return the prompt and the answers of one or two sides, each an answer or a whole conversation."""
    values = [record.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str | list):
            raise _missing_field_error(record, name)
    prompt = record.get("prompt")
    if all(isinstance(value, str) for value in values):
        if prompt is None:
            raise DataError("has no field 'prompt', and its sides do not begin with the same messages")
        answers = [{"text": value} for value in values]
        if isinstance(prompt, str):
            return {"text": prompt, "answers": answers}
        read = _parse_messages(prompt, "prompt", record, ignore)
        return {"messages": _plain_messages(read.messages), "tools": list(read.tools), "answers": answers}
    sides, tools = _parse_conversations(record, names, ignore)
    before, rests = _cut_prompt(prompt, sides, record, ignore)
    for name, rest in zip(names, rests, strict=True):
        others = [message.role for message in rest if message.role not in ("assistant", "tool")]
        if others:
            raise DataError(
                f"field {name!r} has a message of {others[0]} after the first different answer; end the sides there"
            )
    return {
        "messages": _plain_messages(before),
        "tools": tools,
        "answers": [{"messages": _plain_messages(rest)} for rest in rests],
    }


def _parse_conversations(
    record: Mapping[str, Any], names: Sequence[str], ignore: Collection[str]
) -> tuple[list[Messages], list[dict[str, Any]]]:
    sides, tools = [], []
    for name in names:
        value = record[name]
        messages = [{"role": "assistant", "content": value}] if isinstance(value, str) else value
        read = _parse_messages(messages, name, record, ignore)
        last = read.messages[-1].role
        if last != "assistant":
            raise DataError(f"field {name!r} ends with a message of {last}, expected the assistant's")
        sides.append(read.messages)
        tools = list(read.tools)
    return sides, tools


def _cut_prompt(
    prompt: Any, sides: Sequence[Messages], record: Mapping[str, Any], ignore: Collection[str]
) -> tuple[Messages, list[Messages]]:
    """Return the messages that all sides answer, and the answer of each side."""
    shared_messages: Messages = ()
    if isinstance(prompt, list):
        shared_messages = _parse_messages(prompt, "prompt", record, ignore).messages
        sides = [_strip_prompt(shared_messages, side) for side in sides]
    shared = _common_beginning(sides)
    rests = [side[len(shared) :] for side in sides]
    if isinstance(prompt, str):
        asked = [message.text_content.strip() for message in shared if message.role == "user"]
        if shared and prompt.strip() not in (asked[:1] + asked[-1:]):
            raise DataError("its sides begin with a question that differs from field 'prompt'; remove the line")
        return shared or _parse_messages(
            [{"role": "user", "content": prompt}], "prompt", record, ignore
        ).messages, rests
    if prompt is not None and not shared_messages:
        raise DataError(f"field 'prompt' holds a JSON {type(prompt).__name__}, expected text or a list of messages")
    if not shared_messages and not shared:
        raise DataError("has no field 'prompt', and its sides do not begin with the same messages")
    return (*shared_messages, *shared), rests


def _strip_prompt(prompt: Messages, side: Messages) -> Messages:
    """Return a side's messages behind the prompt, which it may repeat, with its system text or without."""
    for prefix in (prompt, prompt[1:] if prompt[0].role == "system" else prompt):
        if prefix and _are_same(side[: len(prefix)], prefix):
            return side[len(prefix) :]
    if side[0].role != "assistant":
        raise DataError("its sides begin with messages that differ from field 'prompt'; remove the line")
    return side


def _common_beginning(sides: Sequence[Messages]) -> Messages:
    """Return the common beginning of all sides before their answers; empty where a side is an answer alone."""
    first, max_shared = sides[0], min(len(side) for side in sides) - 1
    if max_shared < 0:
        raise DataError("a side has no text after field 'prompt'; remove the line")
    is_shared = [
        all(_are_same(side[index : index + 1], first[index : index + 1]) for side in sides)
        for index in range(max_shared)
    ]
    num_shared = is_shared.index(False) if False in is_shared else max_shared
    if len(sides) == 1:
        # one side alone: all that stands before its last answer
        num_shared = max((index for index in range(max_shared) if first[index].role == "user"), default=-1) + 1
    while num_shared and first[num_shared - 1].role == "assistant":
        num_shared -= 1
    if any(side[num_shared].role != "assistant" for side in sides):
        raise DataError("the prompt is not shared: its sides differ before the assistant answers; remove the line")
    return first[:num_shared]


def _are_same(some: Messages, others: Messages) -> bool:
    """Return whether a template sees the same; weights count for answers alone."""
    return [message.for_template() for message in some] == [message.for_template() for message in others]


def _plain_messages(messages: Messages) -> list[dict[str, Any]]:
    return [message.model_dump(mode="json") for message in messages]


def _parse_messages(value: Any, name: str, record: Mapping[str, Any], ignore: Collection[str]) -> Conversation:
    """Read messages as every conversation is read, with the tools and the system text of the line."""
    if not isinstance(value, list):
        raise DataError(f"field {name!r} holds a JSON {type(value).__name__}, expected text or a list of messages")
    is_answer = bool(value) and isinstance(value[0], dict) and value[0].get("role") == "assistant"
    beside = ("tools",) if is_answer else ("tools", "system")
    try:
        return parse_conversation({"messages": value, **{key: record.get(key) for key in beside}}, "messages", ignore)
    except DataError as exc:
        raise DataError(f"field {name!r}: {exc}") from exc


def _parse_transcripts(record: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    """Cut two transcripts before the last answer."""
    del ignore
    cut = []
    for name in ("chosen", "rejected"):
        text = record.get(name)
        if not isinstance(text, str):
            raise _missing_field_error(record, name)
        before, mark, answer = text.rpartition("\n\nAssistant:")
        if not mark:
            raise DataError(f"field {name!r} has no answer: no line begins with 'Assistant:'")
        cut.append((before, answer.strip()))
    if cut[0][0] != cut[1][0]:
        raise DataError("the prompt is not shared: the transcripts differ before the last answer; remove the line")
    begins = [(match.start(), match.end(), match[1]) for match in _TURN.finditer(cut[0][0])]
    ends = [start for start, _, _ in begins[1:]] + [len(cut[0][0])]
    if not begins or begins[0][0] != 0:
        raise DataError("field 'chosen' does not begin with a turn: expected a blank line and 'Human:'")
    turns = [
        {"role": _SPEAKERS[speaker], "content": cut[0][0][behind:stop].strip()}
        for (_, behind, speaker), stop in zip(begins, ends, strict=True)
    ]
    return {"messages": turns, "answers": [{"text": answer} for _, answer in cut]}


def _missing_field_error(record: Mapping[str, Any], name: str) -> DataError:
    keys = keys_of(dict(record))
    return DataError(f"has no field {name!r} with text or messages; its fields are: {keys}; set `shape`")


_SHAPES: Mapping[PreferenceShape, Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]]] = {
    "pairs": _parse_pair,
    "hh": _parse_transcripts,
    "labelled": _parse_labelled,
}
