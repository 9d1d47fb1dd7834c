"""A chat template in Jinja's sandbox: the text of messages, and which characters of it the assistant writes.

Runs in a process of its own, see `sandbox_process`: this file bounds the template's reach and output, the process
bounds its time and memory.
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 1 << 23
"""Of one text; a template that writes more is refused."""

Span = tuple[int, int, int | None]
"""First character, the one behind the last, and the number of the assistant's message where that is known."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class UnstableTemplateError(Exception):
    """A template does not write a conversation so that its beginning stays as it is when the conversation goes on."""


class TooMuchTextError(Exception):
    """A template writes more than it may."""


class GenerationTag(Extension):
    """The tag ``{% generation %}``: its body is the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own attribute

    def parse(self, parser: Any) -> Any:
        """Put marks around the body."""
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line_number)

    def _marked(self, caller: Callable[[], str]) -> str:
        mark = getattr(self.environment, "generation_mark", "")
        return f"{mark}{caller()}{mark}"


class PlainDict:
    """A maker of dictionaries that is no type, so that nothing can be reached by way of one."""

    def __call__(self, *pairs: Any, **named: Any) -> dict[Any, Any]:
        """Make one."""
        return dict(*pairs, **named)


class PlainNamespace(jinja2.utils.Namespace):
    """A namespace that takes no name with an underscore before it: Python's own lie behind those."""

    def __init__(*given: Any, **named: Any) -> None:
        entries = dict(*given[1:], **named)
        for name in entries:
            PlainNamespace._check_attribute(name)
        jinja2.utils.Namespace.__init__(given[0], entries)

    def __setitem__(self, name: str, value: Any) -> None:
        PlainNamespace._check_attribute(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check_attribute(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"sets {name[:40]!r} on a namespace")


class SandboxedTemplate:
    """A compiled template, in the environment that templates of the hub expect.

    Args:
        variables: Variables beside the messages: the names of special tokens.
        today: The date that ``strftime_now`` gives.
    """

    def __init__(self, source: str, variables: Mapping[str, str], today: date) -> None:
        environment: Any = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["dict"] = PlainDict()
        environment.globals["namespace"] = PlainNamespace
        environment.globals["strftime_now"] = datetime(today.year, today.month, today.day).strftime
        self._environment = environment
        self._variables = dict(variables)
        self._template = environment.from_string(source)
        self._marks_turns = _GENERATION.search(source) is not None

    def render_text(self, messages: Sequence[Any], tools: Sequence[Any], *, asks: bool, mark: str = "") -> str:
        """Render messages.

        Args:
            asks: Whether the beginning of the assistant's next message is put behind them.
            mark: Put around the body of every ``{% generation %}``.

        Raises:
            jinja2.exceptions.TemplateError: It fails, or does what no template may.
        """
        self._environment.generation_mark = mark
        pieces, length = [], 0
        variables = {"messages": messages, "tools": tools or None, "documents": None, "add_generation_prompt": asks}
        for piece in self._template.generate(**{**self._variables, **variables}):
            length += len(piece)
            if length > MAX_CHARACTERS:
                raise TooMuchTextError
            pieces.append(piece)
        return "".join(pieces)

    def render_turns(
        self, messages: Sequence[Any], tools: Sequence[Any], wanted: Sequence[int] | None = None
    ) -> tuple[str, list[Span]]:
        """Render a whole conversation, and find the assistant's text in it.

        A template with ``{% generation %}`` marks it itself. In any other one, a message is the text added when the
        message follows the beginning of the assistant's turn.

        Args:
            wanted: Numbers of the assistant's messages that are looked for; left out: all. Others may be written
                otherwise once the conversation goes on.

        Raises:
            UnstableTemplateError: That beginning changes when the conversation goes on, or one is not in its part.
        """
        if self._marks_turns:
            return self._turns_by_tag(messages, tools)
        turn_numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return self._turns_by_prefix(messages, tools, turn_numbers if wanted is None else wanted)

    def _turns_by_tag(self, messages: Sequence[Any], tools: Sequence[Any]) -> tuple[str, list[Span]]:
        # nothing in a message can hold it
        mark = f"\x00{secrets.token_hex(16)}\x00"
        parts = self.render_text(messages, tools, asks=False, mark=mark).split(mark)
        inside = parts[1::2]
        of_assistant = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(parts) % 2 == 0 or not inside:
            raise UnstableTemplateError("its {% generation %} marks no text of the assistant")
        owners = of_assistant if len(of_assistant) == len(inside) else [None] * len(inside)
        spans, position = [], 0
        for before, body, owner in zip(parts[0::2], inside, owners, strict=False):
            position += len(before)
            spans.append((position, position + len(body), owner))
            position += len(body)
        return "".join(parts), spans

    def _turns_by_prefix(
        self, messages: Sequence[Any], tools: Sequence[Any], wanted: Sequence[int]
    ) -> tuple[str, list[Span]]:
        full_text, behind = self.render_text(messages, tools, asks=False), 0
        spans: list[Span] = []
        for number in wanted:
            message = messages[number]
            begin = self.render_text(messages[:number], tools, asks=True)
            prefix = self.render_text(messages[: number + 1], tools, asks=False)
            if not (
                full_text.startswith(begin) and full_text.startswith(prefix) and behind <= len(begin) < len(prefix)
            ):
                raise UnstableTemplateError(f"message {number + 1} changes the text before it")
            if (message["content"] or "").strip() not in full_text[len(begin) : len(prefix)]:
                raise UnstableTemplateError(f"message {number + 1} is not written unchanged")
            behind = len(prefix)
            spans.append((len(begin), behind, number))
        return full_text, spans


def _raise_template_error(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **others: Any) -> str:
    json_options = {name: others[name] for name in ("separators", "sort_keys") if name in others}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **json_options)
