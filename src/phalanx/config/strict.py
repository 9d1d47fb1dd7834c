"""The base class of every config, and a text that is one of a table's names."""

import functools
import operator
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from phalanx.config.code_source import is_own, parse_reference
from phalanx.config.own_code import OWN_KIND
from phalanx.errors import ConfigError


class StrictModel(BaseModel):
    """Frozen data; validation is strict and refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


RENAMED_KEYS = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)
"""For a section with renamed keys: a file may hold a field's name or its alias, which was its name before; digests and
written files hold the alias, so they stay as they were."""


def later_key(default: Any, **limits: Any) -> Any:
    """Return the field of a key that older run files lack: at its default it is in no file and changes no digest."""
    return Field(default=default, exclude_if=lambda value: value == default, **limits)


class RefusedKeyError(ValueError):
    """A validator refuses keys of a file, and programs get more than the message.

    Attributes:
        facts: ``key``, ``found``, ``expected`` and ``do``, as `phalanx.errors.FACTS` names them.
    """

    def __init__(self, message: str, *, key: str, found: str, expected: str, do: str) -> None:
        super().__init__(message)
        self.facts = {"key": key, "found": found, "expected": expected, "do": do}


def any_kind(configs: Mapping[str, type[StrictModel]], own: type[StrictModel] | None = None) -> Any:
    """Return the type of any of these sections, told apart by ``kind``.

    Args:
        own: Section of the user's own code; its kind is a reference.
    """
    table = configs if own is None else {**configs, OWN_KIND: own}
    tagged: list[Any] = [Annotated[config, Tag(name)] for name, config in table.items()]
    return Annotated[functools.reduce(operator.or_, tagged), Discriminator(_kind_of)]


def _kind_of(value: Any) -> Any:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return OWN_KIND if is_own(kind) else kind


def one_of(names: Collection[str] | Callable[[], Collection[str]]) -> AfterValidator:
    """Accept members of `names` when a config is read, and refuse other values as a `Literal` would.

    Args:
        names: A table by name, or what gives the names where only some of a table's count.
    """

    def check(value: str) -> str:
        return check_name(value, names() if callable(names) else names)

    return AfterValidator(check)


def check_name(value: str, known: Collection[str], *, or_own: bool = False) -> str:
    """Return a name of a table, or a reference to code of the user's own where `or_own` allows it."""
    if or_own and is_own(value):
        return check_reference(value)
    if value not in known:
        names = [*known, OWN_KIND] if or_own else known
        *others, last = map(repr, names)
        either = f"{', '.join(others)} or {last}" if others else last
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": either})
    return value


def check_reference(kind: str) -> str:
    """Return a reference to code of the user's own."""
    try:
        parse_reference(kind)
    except ConfigError as exc:
        raise ValueError(str(exc)) from exc
    return kind
