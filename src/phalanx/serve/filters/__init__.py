"""Filters of clients' and models' texts: a text is refused, or passes unchanged with notes."""

from typing import TYPE_CHECKING

from phalanx.late_names import late_names

if TYPE_CHECKING:
    from phalanx.serve.filters.config import (
        FiltersConfig as FiltersConfig,
        InputFilters as InputFilters,
        OutputFilters as OutputFilters,
    )
    from phalanx.serve.filters.filters import (
        AdmittedText as AdmittedText,
        HeldJson as HeldJson,
        TextFilters as TextFilters,
        map_texts as map_texts,
    )
    from phalanx.serve.filters.note import FilterNote as FilterNote, TextRefused as TextRefused
    from phalanx.serve.filters.stream import StreamFilter as StreamFilter
    from phalanx.serve.filters.verbatim import VerbatimIndex as VerbatimIndex


if not TYPE_CHECKING:
    __getattr__ = late_names(__name__)
