"""The results of filters: a place in a text, a note for logs and answers, and a refusal."""

from dataclasses import dataclass
from typing import Literal

from phalanx.config import StrictModel
from phalanx.errors import DataError


@dataclass(frozen=True)
class Finding:
    """A place that a scan has something to say about.

    Attributes:
        kind: One word of the scan; never a part of the text.
        start: Place of the first character.
        end: Place behind the last character, at least `start`.
    """

    kind: str
    start: int
    end: int


class FilterNote(StrictModel):
    """All findings of one kind in one text; it has no character of the text.

    Attributes:
        action: ``noted``: the text passed as it is; ``set aside``: a provenance wrapper was kept from the model.
    """

    filter: str
    kind: str
    action: Literal["noted", "set aside"] = "noted"
    count: int
    first: int


class TextRefused(DataError):  # noqa: N818 - a verdict on a text, named as the routes speak of it
    """A filter refuses a text.

    Attributes:
        reason: Kind and place; no character of the text.
    """

    def __init__(self, filter_name: str, reason: str) -> None:
        super().__init__(f"{filter_name}: {reason}")
        self.filter_name = filter_name
        self.reason = reason
