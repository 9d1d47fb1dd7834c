"""The interface of a rule of a data build, and its possible outcomes for a document."""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

from phalanx.config import RENAMED_KEYS, StrictModel
from phalanx.data.rules.page import Page
from phalanx.errors import DataError


class RuleSettings(StrictModel):
    """The keys of a rule in a recipe; each has its own, and its name as the only value of `kind`."""

    model_config = RENAMED_KEYS

    kind: str


@dataclass(frozen=True)
class RuleReason:
    """Why a rule does not let a document pass as it is.

    Attributes:
        measure: Name of the measure in the rule's own terms: ``words``, ``top_2_gram``.
        limit: Limit in the recipe; empty where there is no threshold.
    """

    measure: str
    value: float | int | str
    limit: float | int | str = ""


@dataclass(frozen=True)
class Drop:
    """The document is left out."""

    reason: RuleReason


@dataclass(frozen=True)
class Quarantine:
    """The document is set aside until a person has decided; it is in no shard until then."""

    reason: RuleReason


@dataclass(frozen=True)
class Edit:
    """The document goes on with another text; `places` were changed."""

    text: str
    places: int
    reason: RuleReason


@dataclass(frozen=True)
class Tag:
    """The document goes on with further fields, which order, mixture and lookups may use."""

    fields: Mapping[str, str | int | float]


Outcome = Drop | Quarantine | Edit | Tag | None
"""None: the document passes as it is."""


class DocumentRule(Protocol):
    """A rule that looks at one document at a time: its outcome depends on the document and its settings alone."""

    def judge_page(self, page: Page) -> Outcome:
        """Say what becomes of a document."""


class Texts(Protocol):
    """All documents of a build that have come this far, by number; texts are read from disk when asked for."""

    def __len__(self) -> int:
        """How many there are."""

    def read_page(self, number: int) -> Page:
        """One document."""


class CorpusRule(Protocol):
    """A rule that compares documents: a mark is made of each by many processes, then one decides over all marks."""

    def mark_page(self, page: Page) -> bytes:
        """Return the decision's input of one document: signatures or counts, at most a few KiB."""

    def decide_outcomes(self, marks: Iterable[bytes], texts: Texts) -> Iterator[tuple[int, Outcome]]:
        """Say what becomes of each document that does not pass as it is.

        Args:
            marks: Marks of every document, in the order of their numbers from 0.

        Yields:
            Numbers, each at most once, in rising order, with their outcomes: the same whatever the number of processes
            that made the marks.
        """


Rule = DocumentRule | CorpusRule


def import_library(module: str, rule: str) -> ModuleType:
    """Import a library of the extra `data`."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise DataError(f"rule {rule!r} needs {module.partition('.')[0]}; install phalanx-train[data]") from exc
