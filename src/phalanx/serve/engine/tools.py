"""Calls of tools as the model's own template writes them: found by rendering one, forced by a grammar, read back."""

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.config import canonical_json, parse_strict_json
from phalanx.data.chat import ChatMessage
from phalanx.data.chat.conversation import Conversation, ToolCall
from phalanx.errors import DataError, ModelError
from phalanx.serve.engine.grammar import check_schema
from phalanx.serve.engine.request import Grammar, Tool
from phalanx.serve.text_model import TextModel

_PROBE_NAME, _PROBE_KEY, _PROBE_VALUE = "zq_probe_tool", "zq_key", "zq_value"
_MAX_CALL_CHARACTERS = 1 << 16


@dataclass(frozen=True)
class ToolFormat:
    """How a template writes one call.

    Attributes:
        before: Text before the JSON of a call, such as ``<tool_call>``; without white space around it.
        arguments_key: Name under which the JSON has the arguments.
    """

    before: str
    after: str
    arguments_key: str = "arguments"

    def grammar_of(self, tools: Sequence[Tool]) -> Grammar:
        """Return the grammar of one call of any of some tools.

        Raises:
            BadRequestError: One of their schemas is beyond its bounds.
        """
        for tool in tools:
            check_schema(tool.parameters)
        rules = [
            f"start: {json.dumps(self.before)} WS call WS {json.dumps(self.after)}" if self.before else "start: call"
        ]
        schemas = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, self.arguments_key: tool.parameters or {"type": "object"}},
                "required": ["name", self.arguments_key],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        options = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        rules += [f"call: %json {json.dumps({**schema, **options})}", 'WS: "\\n"?']
        return Grammar(kind="lark", source="\n".join(rules))

    def read_call(self, text: str) -> ToolCall | None:
        """Return the call that a text between the marks is; None where it is none."""
        try:
            value = parse_strict_json(text)
            # infinity and half of a surrogate pair cannot be sent on
            canonical_json(value)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get(self.arguments_key, {})
        if not isinstance(arguments, dict) or not 1 <= len(value["name"]) <= 200:
            return None
        return ToolCall(name=value["name"], arguments=arguments, id=f"call_{secrets.token_hex(12)}")


class ToolReader:
    """Tells text from calls while a text is written."""

    def __init__(self, tool_format: ToolFormat, names: frozenset[str]) -> None:
        self._format, self._names = tool_format, names
        self._pending = ""
        self._is_inside = False

    def feed_text(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take a piece; return the text outside of calls that is decided, and the calls that are complete."""
        self._pending += text
        plain = ""
        calls: list[ToolCall] = []
        while True:
            mark = self._format.after if self._is_inside else self._format.before
            place = self._pending.find(mark)
            if place < 0:
                break
            inside, self._pending = self._pending[:place], self._pending[place + len(mark) :]
            if self._is_inside:
                outside, more = self._judge_call(inside)
                plain, calls = plain + outside, calls + more
            else:
                plain += inside
            self._is_inside = not self._is_inside
        if self._is_inside and len(self._pending) <= _MAX_CALL_CHARACTERS:
            return plain, calls
        hold = 0 if self._is_inside else _overlap(self._pending, self._format.before)
        cut = len(self._pending) - hold
        plain, self._pending = plain + self._pending[:cut], self._pending[cut:]
        return plain, calls

    def close(self) -> tuple[str, list[ToolCall]]:
        """End the text; a call whose closing mark is missing counts where it is whole."""
        rest, self._pending = self._pending, ""
        return self._judge_call(rest) if self._is_inside else (rest, [])

    def _judge_call(self, inside: str) -> tuple[str, list[ToolCall]]:
        call = self._format.read_call(inside)
        if call is None or call.name not in self._names:
            # what is no call of an offered tool stays visible as text
            return f"{self._format.before}{inside}{self._format.after}", []
        return "", [call]


def _overlap(text: str, mark: str) -> int:
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(mark[:length])), 0)


def find_tool_format(text_model: TextModel) -> ToolFormat | None:
    """Return how the template of a model writes a call; None where it writes neither tools nor calls."""
    tool = Tool(name=_PROBE_NAME).for_template()
    question = ChatMessage(role="user", content="a")
    call = ToolCall(name=_PROBE_NAME, arguments={_PROBE_KEY: _PROBE_VALUE}, id="call_000000000")
    answer = ChatMessage(role="assistant", content="", tool_calls=(call,))
    try:
        with_tools, without = text_model.render_prompt([question], [tool]), text_model.render_prompt([question])
        conversation = Conversation(messages=(question, answer), tools=(tool,))
        written = text_model.render_conversation(conversation)
    except (DataError, ModelError):
        return None
    if _PROBE_NAME not in with_tools or _PROBE_NAME in without or _PROBE_VALUE not in written:
        return None
    return _format_in(written, len(with_tools) if written.startswith(with_tools) else written.rfind(_PROBE_NAME))


def _format_in(written: str, begin: int) -> ToolFormat | None:
    """Return the marks around the JSON object that holds the probe's name and value."""
    place = written.rfind(_PROBE_NAME)
    decoder = json.JSONDecoder()
    start = written.rfind("{", 0, place)
    if start < 0:
        return None
    try:
        value, stop = decoder.raw_decode(written, start)
    except ValueError:
        return None
    key = next((name for name, inner in value.items() if inner == {_PROBE_KEY: _PROBE_VALUE}), None)
    if key is None or value.get("name") != _PROBE_NAME:
        return None
    before = written[min(begin, start) : start].strip().splitlines()
    after = written[stop:].strip().split("\n")[0].split("<|")[0].strip()
    return ToolFormat(before[-1].strip() if before else "", after, key) if before and after else None


def describe_call(call: ToolCall) -> dict[str, Any]:
    """Return a call as the chat protocol writes it."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": call.id, "type": "function", "function": function}
