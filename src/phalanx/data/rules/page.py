"""A document as rules see it: what several of them need of its text is computed once."""

from collections.abc import Mapping
from functools import cached_property

from phalanx.data.sources import Document


class Page:
    """One document on its way through the rules.

    Args:
        document: As its source or the last edit left it.
        source: Name of its source in the recipe.
    """

    def __init__(self, document: Document, source: str) -> None:
        self.document, self.source = document, source

    @property
    def text(self) -> str:
        """The text, without a copy."""
        return self.document.text

    @property
    def fields(self) -> Mapping[str, str | int | float]:
        """What is known of it beside its text."""
        return self.document.fields

    @cached_property
    def words(self) -> list[str]:
        """The text split at white space."""
        return self.text.split()
