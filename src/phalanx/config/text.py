"""Make text of another party, a model or a document harmless before a terminal, a log or a page shows it."""

import hashlib
import json
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel


def canonical_json(value: Any) -> bytes:
    """Encode JSON data in one way only: sorted keys, no spaces, UTF-8, no NaN.

    Raises:
        ValueError: The data holds NaN or infinity, which JSON has no word for.
    """
    return _ENCODER.encode(value).encode()


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def parse_strict_json(
    data: bytes | str,
    parse_float: Callable[[str], float] | None = None,
    parse_int: Callable[[str], int] | None = None,
) -> Any:
    """Parse UTF-8 JSON of which no two readers can understand different things: no double keys, no NaN or infinity.

    Args:
        parse_float: Reads a number with a fraction or exponent; a ValueError refuses it.
        parse_int: Reads a whole number; likewise.

    Raises:
        ValueError: It is something else.
        RecursionError: It is nested deeper than Python's stack.
    """
    return json.loads(
        data if isinstance(data, str) else data.decode("utf-8"),
        object_pairs_hook=unique_keys,
        parse_constant=_refuse_constant,
        parse_float=parse_float,
        parse_int=parse_int,
    )


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make the dict of a JSON object; a ValueError refuses a double key, of which `json` alone keeps the last value."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def digest_config(config: BaseModel) -> str:
    """Return the SHA-256, in hex, over the canonical JSON of a config."""
    return hashlib.sha256(canonical_json(config.model_dump(mode="json"))).hexdigest()


_JOINERS = "\u200c\u200d"
"""Persian, Indic scripts and emoji are written with them; they move no cursor and turn no direction."""
MAX_CHARACTERS = 500
"""Of one text that a peer chose."""


def is_plain(character: str) -> bool:
    """Whether a character is shown as itself: no control, escape, bidirectional, invisible or line-breaking one."""
    # spaces of other widths are harmless, and a page of ours has them
    return character.isprintable() or unicodedata.category(character) == "Zs"


def printable_text(text: str, limit: int = MAX_CHARACTERS, *, keep: str = "") -> str:
    """Return at most `limit` characters of a text, with a question mark for each that is not plain.

    Args:
        limit: Characters beyond it are cut off.
        keep: Characters that may pass although they are not plain, such as line ends in a text of our own.
    """
    return "".join(character if is_plain(character) or character in keep else "?" for character in text[:limit])


def join_names(names: Sequence[str], max_names: int = 20) -> str:
    """Return names with commas, the first ones of many and how many more there are."""
    more = f" and {len(names) - max_names:,} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more


def escape_controls(text: str, keep: str = "\n\t") -> str:
    """Return a whole text of a model or a document as a terminal may show it, with the code of each control character.

    Args:
        text: Any length; pieces of one text may be passed one after the other.
        keep: Characters that may pass although they are not plain.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if is_plain(character) or character in keep or character in _JOINERS else ascii(character)[1:-1]
        for character in text
    )
