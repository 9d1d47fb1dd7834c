"""What a chat template leaves out: a turn of which a part does not come out would be learned as another one."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from phalanx.data.chat.conversation import ChatMessage, ToolCall
from phalanx.data.chat.renderer import RenderedChat
from phalanx.errors import DataError

_SHOWN = 40


def check_written(
    rendered: RenderedChat, messages: Sequence[ChatMessage], template: str, learned_from: int = 0
) -> None:
    """Look for the text and the calls of every message in a template's output, and for learned reasoning.

    A template may write a text as JSON, and without white space around it. Reasoning of a turn that is not learned may
    be missing: models are trained to get the earlier turns without it.

    Args:
        rendered: The text; without turns where it is a prompt.
        template: Its name, for the message.
        learned_from: The first message that may be learned.

    Raises:
        DataError: A part is missing.
    """
    places = {turn.message: rendered.text[turn.start : turn.stop] for turn in rendered.turns}
    for number, message in enumerate(messages):
        text = places.get(number, rendered.text)
        parts = [("text", message.text), *_parts_of_calls(message.tool_calls)]
        if rendered.turns and number >= learned_from and message.role == "assistant" and message.weight > 0:
            parts.append((message.reasoning_field, message.reasoning or ""))
        for what, part in parts:
            if not _is_in(part, text):
                raise DataError(
                    f"turn {number + 1}: its {what} ({part.strip()[:_SHOWN]!r}) is not written by chat template "
                    f"{template}; use a template that writes it, name its field in `ignore`, or remove the line"
                )


def _parts_of_calls(calls: Sequence[ToolCall]) -> Iterator[tuple[str, str]]:
    for call in calls:
        yield "tool call", call.name
        yield from (("tool call's argument", leaf) for leaf in _leaves(call.arguments))


def _leaves(value: Any) -> Iterator[str]:
    """Texts and numbers in the arguments of a call."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield value if isinstance(value, str) else json.dumps(value)


def _is_in(part: str, text: str) -> bool:
    plain = part.strip()
    as_json = (json.dumps(plain, ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    return plain in text or any(form in text for form in as_json)
