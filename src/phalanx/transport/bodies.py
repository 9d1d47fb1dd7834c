"""The bodies of frames: a class for each kind, read once and strictly, whoever the parties are."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError

from phalanx.config import StrictModel, canonical_json
from phalanx.errors import FrameError

_MOST_SHOWN = 3


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
        FrameError: The kind is unknown, or a field is missing, unknown or of the wrong type.
    """
    if kind not in known:
        expected = ", ".join(sorted(known))
        raise FrameError(f"frame of kind {kind[:40]!r}: expected one of {expected}; run the same release")
    try:
        return known[kind].model_validate_json(canonical_json(body))
    except ValidationError as exc:
        raise FrameError(f"frame of kind {kind!r}: its body is malformed; {_without_values(exc)}") from exc
    except ValueError as exc:
        raise FrameError(f"frame of kind {kind!r}: its body is malformed; {exc}") from exc


def _without_values(error: ValidationError) -> str:
    """Where and what: no error message shows what a peer has sent."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    places = [".".join(str(part) for part in one["loc"]) for one in found]
    shown = list(zip(places, found, strict=True))[:_MOST_SHOWN]
    return "; ".join(f"{place}: {one['msg']} ({one['type']})" for place, one in shown)
