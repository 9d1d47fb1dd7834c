"""The bodies of frames: a class for each kind, read once and strictly, for any protocol on the transport."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from phalanx.config import StrictModel, canonical_json, printable
from phalanx.errors import FrameError, OutOfBoundsError

_MOST_SHOWN = 3
_MOST_OF_A_PLACE = 60
_BOUNDS = frozenset(
    {
        "greater_than",
        "greater_than_equal",
        "less_than",
        "less_than_equal",
        "string_pattern_mismatch",
        "string_too_long",
        "string_too_short",
        "too_long",
        "too_short",
    }
)
"""What pydantic calls a value that is beyond its bounds; every other error may be the word of another release."""


class Body(StrictModel):
    """A frame's body; `kind` is the kind of the frame that has it."""

    kind: ClassVar[str]


_Body = TypeVar("_Body", bound=Body)


def by_kind(classes: Iterable[type[_Body]]) -> dict[str, type[_Body]]:
    """The bodies that the parties of one protocol know, by kind."""
    return {one.kind: one for one in classes}


def parse_body(known: Mapping[str, type[_Body]], kind: str, body: dict[str, Any]) -> _Body:
    """Parse a frame's body.

    Args:
        known: What `by_kind` gave.
        kind: Of the frame.
        body: What the frame says.

    Raises:
        OutOfBoundsError: All fields are there and of the right types, and values are beyond their bounds.
        FrameError: The kind is unknown, or a field is missing, unknown or of the wrong type.
    """
    if kind not in known:
        expected = ", ".join(sorted(known))
        raise FrameError(f"frame of kind {kind[:40]!r}: expected one of {expected}; run the same release")
    try:
        return known[kind].model_validate_json(canonical_json(body))
    except ValidationError as exc:
        beyond = all(one["type"] in _BOUNDS for one in exc.errors(include_url=False, include_input=False))
        error = OutOfBoundsError if beyond else FrameError
        raise error(f"frame of kind {kind!r}: its body is malformed; {_without_values(exc)}") from exc
    except ValueError as exc:
        raise FrameError(f"frame of kind {kind!r}: its body is malformed; {exc}") from exc


def _without_values(error: ValidationError) -> str:
    """Where and what: no error message shows what a peer has sent."""
    found = error.errors(include_url=False, include_context=False, include_input=False)[:_MOST_SHOWN]
    # a key that the peer chose is part of a place
    places = [printable(".".join(str(part) for part in one["loc"]), _MOST_OF_A_PLACE) for one in found]
    return "; ".join(f"{place}: {one['msg']} ({one['type']})" for place, one in zip(places, found, strict=True))
