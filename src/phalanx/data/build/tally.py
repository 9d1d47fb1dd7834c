"""Counts of what became of every document and byte: added up by piece and source, and checked against each other."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from phalanx.errors import DataError

Fate = Literal["read", "kept", "broken", "dropped", "quarantined", "edited", "tagged", "released"]
LEFT_OUT: tuple[Fate, ...] = ("broken", "dropped", "quarantined")


@dataclass
class ByteTally:
    """Counts by what became of documents, by the step that decided, and by measure.

    The measures are ``documents``, ``raw_bytes`` and ``text_bytes``; of an edit ``places`` and ``net_bytes`` (what its
    text has more, or less) in place of the sizes.
    """

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def count_document(self, fate: Fate, step: str, **measures: int) -> None:
        """Count one document."""
        for name, value in measures.items():
            self.counts[fate, step, name] += value
        self.counts[fate, step, "documents"] += 1

    def sum_measure(self, measure: str, *fates: Fate) -> int:
        """Return the sum of one measure over some fates and all steps."""
        return sum(value for (fate, _, name), value in self.counts.items() if name == measure and fate in fates)

    def by_step(self, fate: Fate) -> dict[str, dict[str, int]]:
        """Return the measures of one fate by step."""
        counts: dict[str, dict[str, int]] = {}
        for (of, step, name), value in sorted(self.counts.items()):
            if of == fate:
                counts.setdefault(step, {})[name] = value
        return counts

    def merge_tally(self, other: "ByteTally") -> None:
        """Add the counts of another one."""
        # Counter.update adds, and keeps a sum that is not positive
        self.counts.update(other.counts)

    def to_json(self) -> list[list[Any]]:
        """Return the counts as rows."""
        return [[*key, value] for key, value in sorted(self.counts.items())]

    @classmethod
    def from_json(cls, rows: Iterable[list[Any]]) -> "ByteTally":
        """Read what `to_json` returned."""
        return cls(Counter({(fate, step, name): value for fate, step, name, value in rows}))


def check_account(source: str, read: ByteTally, tally: ByteTally) -> None:
    """Compare the bytes that were read of a source with the bytes of its account at the end.

    Args:
        tally: Bytes that are kept in shards and left out in the account, counted on disk.
    """
    for what, expected, ends in _paired_sums(read, tally):
        if expected != ends:
            raise DataError(
                f"account of source {source!r}: {what} do not add up: read {expected}, included and dropped {ends}; "
                "this is a fault of a rule or of Phalanx: no dataset was made"
            ).with_facts(key=source, expected=str(expected), found=str(ends))


def _paired_sums(read: ByteTally, tally: ByteTally) -> Iterator[tuple[str, int, int]]:
    ends: tuple[Fate, ...] = ("kept", *LEFT_OUT)
    begun: tuple[Fate, ...] = ("read", "broken")
    yield "documents", read.sum_measure("documents", *begun), tally.sum_measure("documents", *ends)
    yield "raw bytes", read.sum_measure("raw_bytes", *begun), tally.sum_measure("raw_bytes", *ends)
    text = read.sum_measure("text_bytes", "read") + read.sum_measure("net_bytes", "edited")
    yield "bytes of text", text, tally.sum_measure("text_bytes", *ends)
