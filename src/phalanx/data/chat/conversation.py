"""A conversation: messages of known roles, tool calls and their results; one strict form, whatever shape it came in."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from phalanx.config import StrictModel
from phalanx.data.sources.turns import DialogueTurn, Shape, turns_of
from phalanx.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
# names of the same roles in data sets that are about
_OTHER_ROLES = {"developer": "system", "function": "tool", "observation": "tool", "ipython": "tool"}
_MAX_TOOLS = 1000
ReasoningField = Literal["reasoning_content", "reasoning", "thinking"]
_REASONING: tuple[ReasoningField, ...] = ("reasoning_content", "reasoning", "thinking")

Weight = Field(default=1.0, ge=0.0, le=1e6, allow_inf_nan=False)


class ToolCall(StrictModel):
    """One call of a function by the assistant.

    Attributes:
        wrapped: Whether the file has it as ``{"function": {...}}``, as templates then get it.
    """

    name: str = Field(min_length=1, max_length=200)
    arguments: dict[str, Any] = Field(default={})
    id: str | None = Field(default=None, max_length=200)
    wrapped: bool = True

    def for_template(self) -> dict[str, Any]:
        """Return it in the form that it had."""
        function = {"name": self.name, "arguments": self.arguments}
        named = {"id": self.id} if self.id else {}
        return {"type": "function", "function": function, **named} if self.wrapped else {**function, **named}


class ChatMessage(StrictModel):
    """One message of a conversation.

    Attributes:
        content: Its text; may be empty beside tool calls. None where the file has null, which templates tell apart.
        reasoning: Thoughts of the assistant before its answer, where a template writes them.
        reasoning_field: The name under which the file has it, and templates look for it.
        tool_calls: Functions that the assistant calls.
        name: Name of the author, or of the function with this result.
        tool_call_id: Call that this is the result of.
        weight: Weight of its loss, for the assistant's messages; 0 leaves it out of the loss.
    """

    role: Role
    content: str | None = ""
    reasoning: str | None = None
    reasoning_field: ReasoningField = "reasoning_content"
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = Field(default=None, max_length=200)
    tool_call_id: str | None = Field(default=None, max_length=200)
    weight: float = Weight

    @model_validator(mode="after")
    def _check_tool_calls(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} calls tools; only the assistant may")
        return self

    @property
    def text_content(self) -> str:
        """Its text; empty where it has none."""
        return self.content or ""

    @property
    def has_no_content(self) -> bool:
        """Whether it has neither text nor calls nor reasoning."""
        return not (self.text_content.strip() or self.tool_calls or (self.reasoning or "").strip())

    def for_template(self) -> dict[str, Any]:
        """Return it as it stands in the file: templates are written for these names, and for null."""
        plain: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            plain["tool_calls"] = [call.for_template() for call in self.tool_calls]
        others = {self.reasoning_field: self.reasoning, "name": self.name, "tool_call_id": self.tool_call_id}
        return {**plain, **{name: value for name, value in others.items() if value is not None}}


class Conversation(StrictModel):
    """Messages in order, with the tools that the assistant may call.

    Attributes:
        tools: JSON schema of each function, as templates expect it.
    """

    messages: tuple[ChatMessage, ...] = Field(min_length=1, max_length=10_000)
    tools: tuple[dict[str, Any], ...] = Field(default=(), max_length=_MAX_TOOLS)
    weight: float = Weight

    def check_learnable(self) -> None:
        """Return where there is something to learn."""
        if not any(message.role == "assistant" and message.weight > 0 for message in self.messages) or not self.weight:
            raise DataError("has no message of the assistant to learn; add one, or remove the line")


def parse_conversation(record: Mapping[str, Any], shape: Shape = "auto", ignore: Collection[str] = ()) -> Conversation:
    """Read a conversation out of one object, of any of the shapes that are about.

    Fields of the object beside its turns, `tools`, `system` and `weight` are not looked at; a field of a message that
    is not known is an error, unless it is null.

    Raises:
        DataError: It is empty, or a turn is wrong; the message names the turn, the caller knows file and line.
    """
    messages = [_parse_turn(turn, number, ignore) for number, turn in enumerate(turns_of(record, shape), start=1)]
    if not messages:
        raise DataError("is an empty conversation; add messages, or remove the line")
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    weight = record.get("weight")
    return checked_conversation(
        {"messages": messages, "tools": _parse_tools(record), **({} if weight is None else {"weight": weight})}
    )


def parse_prompt(record: Mapping[str, Any], ignore: Collection[str] = ()) -> Conversation:
    """Read the messages of a line's `prompt`, with the tools and the system text that stand beside them."""
    beside = {name: record.get(name) for name in ("tools", "system")}
    return parse_conversation({"messages": record["prompt"], **beside}, "messages", ignore)


def checked_conversation(plain: Mapping[str, Any]) -> Conversation:
    """Read a conversation of this form's own fields."""
    try:
        # as JSON: lists are the tuples of the form
        return Conversation.model_validate_json(json.dumps(plain, ensure_ascii=False).encode())
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        location = ".".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
        raise DataError(
            f"{location.replace('messages.', 'turn ', 1)}: {first['msg'].removeprefix('Value error, ')}"
        ) from exc
    except UnicodeEncodeError as exc:
        raise DataError("holds a lone surrogate, which is not text; repair it") from exc
    except (ValueError, RecursionError) as exc:
        raise DataError(f"is not a conversation ({exc})") from exc


def _parse_turn(turn: DialogueTurn, number: int, ignore: Collection[str]) -> dict[str, Any]:
    role = turn.role.lower()
    role = _OTHER_ROLES.get(role, role)
    if role not in ROLES:
        raise DataError(f"turn {number}: has the role {turn.role!r}; expected {', '.join(ROLES)}")
    others = {name: value for name, value in turn.others.items() if value is not None and name not in ignore}
    reasoning = [name for name in _REASONING if name in others]
    if len(reasoning) > 1:
        raise DataError(f"turn {number}: has {' and '.join(reasoning)}; keep one, and ignore the other")
    if reasoning:
        others |= {"reasoning": others.pop(reasoning[0]), "reasoning_field": reasoning[0]}
    calls = others.pop("tool_calls", None) or []
    if not isinstance(calls, list):
        raise DataError(f"turn {number}: tool_calls is not a list")
    if calls:
        others["tool_calls"] = [_parse_tool_call(call, number) for call in calls]
    # an empty system text is none on purpose: templates write their own where there is no such message
    is_said = bool((turn.content or "").strip()) or role == "tool" or (role == "system" and turn.content == "")
    if not is_said and not calls and not others.get("reasoning"):
        raise DataError(f"turn {number}: of role {role!r}, is empty; remove it")
    return {"role": role, "content": turn.content if turn.has_content else "", **others}


def _parse_tool_call(call: Any, number: int) -> dict[str, Any]:
    """Return a call of the common forms: ``{"function": {...}}`` or plain; arguments as an object or as its JSON."""
    plain = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(plain, dict):
        raise DataError(f"turn {number}: a tool call is not an object with a function's name and arguments")
    arguments = plain.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as exc:
            raise DataError(f"turn {number}: the arguments of a tool call are not JSON") from exc
    fields = {"name": plain.get("name"), "arguments": arguments, "id": call.get("id"), "wrapped": plain is not call}
    return {name: value for name, value in fields.items() if value is not None}


def _parse_tools(record: Mapping[str, Any]) -> Sequence[Any]:
    tools = record.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as exc:
            raise DataError("field 'tools' is text that is not JSON") from exc
    if not isinstance(tools, list):
        raise DataError("field 'tools' is not a list")
    return tools
