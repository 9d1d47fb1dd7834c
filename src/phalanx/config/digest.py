"""The digest that parties compare before step 1."""

import hashlib
import json
from typing import Any

from pydantic import BaseModel


def canonical_json(value: Any) -> bytes:
    """Encode JSON data in one way only: sorted keys, no spaces, UTF-8, no NaN.

    Raises:
        ValueError: The data holds NaN or infinity, which JSON has no word for.
    """
    return _ENCODER.encode(value).encode()


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def parse_strict_json(data: bytes) -> Any:
    """Parse UTF-8 JSON of which no two readers can understand different things: no double keys, no NaN or infinity.

    Raises:
        ValueError: It is something else.
        RecursionError: It is nested deeper than Python's stack.
    """
    return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is there twice")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def digest_config(config: BaseModel) -> str:
    """Return the SHA-256, in hex, over the canonical JSON of a config."""
    return hashlib.sha256(canonical_json(config.model_dump(mode="json"))).hexdigest()
