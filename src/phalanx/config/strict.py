"""The base class of every config, and a text that is one of a table's names."""

from collections.abc import Callable, Collection

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class StrictModel(BaseModel):
    """Frozen data; validation is strict and refuses unknown keys, NaN and infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)


def one_of(names: Collection[str] | Callable[[], Collection[str]]) -> AfterValidator:
    """Accept what is in `names` when a config is read, and refuse anything else as a `Literal` would.

    Args:
        names: A table by name, or what gives the names where only some of a table's count.
    """

    def check(value: str) -> str:
        known = names() if callable(names) else names
        if value not in known:
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": _either(known)})
        return value

    return AfterValidator(check)


def _either(names: Collection[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}" if others else last
