"""Records with named fields: which of them a document keeps beside its text."""

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

from pydantic import Field

from phalanx.data.sources.records import FileSettings, RecordClaims, is_text, recorded_text

_FIELD_CHARACTERS = 2000


class ColumnSettings(FileSettings):
    """The keys of sources with named fields in their records.

    Attributes:
        fields: Further fields that documents keep: numbers, truth values and short texts.
        url: Field with the address that a record was fetched from.
        fetched_at: Field with the time of that.
    """

    fields: tuple[str, ...] = ()
    url: str | None = Field(default=None, min_length=1)
    fetched_at: str | None = Field(default=None, min_length=1)

    @property
    def beside(self) -> tuple[str, ...]:
        """All names that are looked at beside the text."""
        return (*self.fields, *(name for name in (self.url, self.fetched_at) if name))


def said_in(record: Mapping[str, Any], config: ColumnSettings) -> RecordClaims:
    """What a record with named fields says of itself."""
    values = {name: record.get(name) for name in config.fields}
    return RecordClaims(
        url=recorded_text(record.get(config.url)) if config.url else None,
        fetched_at=recorded_text(record.get(config.fetched_at), most=64) if config.fetched_at else None,
        fields={name: int(v) if isinstance(v, bool) else v for name, v in values.items() if _is_plain(v)},
    )


def _is_plain(value: Any) -> TypeGuard[str | int | float]:
    if isinstance(value, str):
        return len(value) <= _FIELD_CHARACTERS and is_text(value)
    if isinstance(value, int):
        return abs(value) < 1 << 63
    return isinstance(value, float) and math.isfinite(value)
