"""The tables beside the tokens: one record a document in its part, one in the index of all, and its entry."""

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from phalanx.config import canonical_json
from phalanx.data.normal_form import to_nfc
from phalanx.errors import DataError
from phalanx.security.crypto import parse_canonical

START = np.dtype("<u8")
DOCUMENT = np.dtype([("digest", "u1", (32,)), ("source", "<u4"), ("entry_bytes", "<u4"), ("entry_start", "<u8")])
INDEX = np.dtype(
    [
        ("digest", "u1", (32,)),
        ("part", "<u4"),
        ("source", "<u4"),
        ("document", "<u8"),
        ("start", "<u8"),
        ("tokens", "<u8"),
    ]
)
MAX_ENTRY_BYTES = 64 * 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")

Fields = Mapping[str, str | int | float]


@dataclass(frozen=True)
class DocumentEntry:
    """What a dataset knows of one document beside its tokens.

    Attributes:
        digest: SHA-256 in hex of its text, in NFC and UTF-8, as it was tokenised; `document_digest` computes it.
        source: Number of its source in the manifest.
        name: Name by which a person finds it; the same on every machine.
        fields: Further columns: scores, labels, languages.
    """

    digest: str
    source: int
    name: str
    fields: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        if _DIGEST.fullmatch(self.digest) is None:
            raise DataError(f"document {self.name[:80]!r}: digest {self.digest[:80]!r}: expected 64 hex characters")

    def to_bytes(self) -> bytes:
        """Return name and fields as the file of entries has them."""
        odd = [name for name, value in self.fields.items() if not is_plain(value)]
        if odd:
            raise DataError(
                f"document {self.name[:80]!r}: fields {odd!s:.200}: expected text, finite or 64-bit numbers"
            )
        try:
            content = canonical_json({"fields": dict(self.fields), "name": self.name}) + b"\n"
        except ValueError as exc:
            raise DataError(f"document {self.name[:80]!r}: name or fields are not Unicode text: {exc}") from exc
        if len(content) > MAX_ENTRY_BYTES:
            raise DataError(
                f"document {self.name[:80]!r}: name and fields have {len(content)} bytes, at most "
                f"{MAX_ENTRY_BYTES} are allowed; remove unused fields"
            )
        return content

    @classmethod
    def from_bytes(cls, content: bytes, digest: str, source: int, where: str) -> "DocumentEntry":
        """Read name and fields."""
        try:
            entry = parse_canonical(content.removesuffix(b"\n"))
            name, fields = entry["name"], entry["fields"]
        except (ValueError, KeyError) as exc:
            raise DataError(f"{where}: malformed entry of a document: {exc}; build the dataset again") from exc
        plain = isinstance(name, str) and isinstance(fields, dict)
        if len(entry) != 2 or not plain or not all(is_plain(value) for value in fields.values()):
            raise DataError(f"{where}: expected a name and fields of plain values; build the dataset again")
        return cls(digest, source, name, fields)


def document_digest(text: str) -> str:
    """Return the digest by which a dataset knows a text: SHA-256 in hex of its NFC form in UTF-8.

    Raises:
        DataError: The text holds a lone surrogate, which UTF-8 has no bytes for.
    """
    try:
        return hashlib.sha256(to_nfc(text).encode()).hexdigest()
    except UnicodeEncodeError as exc:
        raise DataError(f"a text holds a lone surrogate at character {exc.start}; read it as UTF-8") from exc


def is_plain(value: object) -> bool:
    """Whether a value may be one of a document's fields: text, a finite number, an integer of 64 bits."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, str) or (isinstance(value, float) and math.isfinite(value))
