"""Numbers of steps, kept as ranges."""

from collections.abc import Iterable
from typing import Self

Range = tuple[int, int]
"""First and last step."""


class Spans:
    """A set of steps that grows at its end.

    Args:
        ranges: Ascending, and none touches the next.
        limit: With more ranges than that, the two oldest become one, and what lies between them counts as held
            from then on; `num` stays the number of steps that were put in.
    """

    def __init__(self, ranges: Iterable[Range] = (), *, limit: int, bridged: int = 0) -> None:
        self.ranges = [(int(first), int(last)) for first, last in ranges]
        self._limit = limit
        self._bridged = bridged

    @classmethod
    def of_json(cls, saved: dict[str, object], limit: int) -> Self:
        """Read what `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: It is malformed.
        """
        ranges: Iterable[Range] = saved["ranges"]  # type: ignore[assignment]
        return cls(ranges, limit=limit, bridged=int(str(saved["bridged"])))

    def to_json(self) -> dict[str, object]:
        """Everything, as JSON data."""
        return {"ranges": [list(ends) for ends in self.ranges], "bridged": self._bridged}

    @property
    def num(self) -> int:
        """How many steps."""
        return sum(last - first + 1 for first, last in self.ranges) - self._bridged

    @property
    def last(self) -> int | None:
        """The newest step; None when there is none."""
        return self.ranges[-1][1] if self.ranges else None

    def add(self, first: int, last: int) -> None:
        """Put in the steps from `first` to `last`."""
        tail = self.ranges[-1:]
        if not tail or first > tail[0][1]:
            # as a rule: thousands of ranges are sorted only after a rollback
            self.ranges[-1:] = union([*tail, (first, last)])
        else:
            self.ranges = union([*self.ranges, (first, last)])
        if len(self.ranges) > self._limit:
            (oldest, end), (begin, newest), *rest = self.ranges
            self._bridged += begin - end - 1
            self.ranges = [(oldest, newest), *rest]

    def take_out(self, first: int, last: int | None = None) -> list[Range]:
        """Take out the steps from `first` on, up to `last` where it is given.

        Returns:
            Those that were in it.
        """
        taken, left = [], []
        for low, high in self.ranges:
            begin, end = max(low, first), high if last is None else min(high, last)
            if begin > end:
                left.append((low, high))
                continue
            taken.append((begin, end))
            left += [ends for ends in ((low, begin - 1), (end + 1, high)) if ends[0] <= ends[1]]
        self.ranges = left
        return taken


def union(ranges: Iterable[Range]) -> list[Range]:
    """Ranges that hold the same steps, ascending, none of which touches the next."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found
