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


def digest_config(config: BaseModel) -> str:
    """Return the SHA-256, in hex, over the canonical JSON of a config."""
    return hashlib.sha256(canonical_json(config.model_dump(mode="json"))).hexdigest()
