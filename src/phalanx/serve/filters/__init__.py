"""Filters of clients' and models' texts: a text is refused, or passes unchanged with notes."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.filters.config import FiltersConfig, InputFilters, OutputFilters
    from phalanx.serve.filters.filters import AdmittedText, TextFilters
    from phalanx.serve.filters.note import FilterNote, TextRefused
    from phalanx.serve.filters.stream import StreamFilter
    from phalanx.serve.filters.verbatim import VerbatimIndex

__all__ = [
    "AdmittedText",
    "FilterNote",
    "FiltersConfig",
    "InputFilters",
    "OutputFilters",
    "StreamFilter",
    "TextFilters",
    "TextRefused",
    "VerbatimIndex",
]


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
