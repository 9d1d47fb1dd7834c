"""Drifts: stages with messages that lean to one side below the tolerance, as the cumulative sums found them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_WHERE = ("stage", "party", "direction")


@dataclass
class Drifts:
    """Counts of the events `drift` by stage, party and direction; they convict no party, but a reader must see them."""

    _rows: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def observe(self, kind: str, body: Mapping[str, Any]) -> None:
        """Follow one event; others than `drift` change nothing."""
        if kind != "drift":
            return
        where = tuple(body[key] for key in _WHERE)
        row = self._rows.setdefault(
            where, {**dict(zip(_WHERE, where, strict=True)), "first_step": body["step"], "times": 0, "bias_sigmas": 0.0}
        )
        row["last_step"] = body["step"]
        row["times"] += 1
        row["bias_sigmas"] = max(row["bias_sigmas"], body["bias_sigmas"], key=abs)

    def rows(self) -> list[dict[str, Any]]:
        """One row a stage, party and direction, with its first and last step and the strongest lean."""
        return [dict(self._rows[where]) for where in sorted(self._rows)]
