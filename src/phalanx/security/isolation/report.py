"""The measures that keep an isolated process apart, and a report of which of them hold."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LABEL = "process: keeps out other users and confines the program; not secret from root or from the machine's owner"


class Measure(StrEnum):
    """One thing that keeps the process apart; the values appear in reports and messages."""

    NAMESPACES = "namespaces"
    NO_CAPABILITIES = "no_capabilities"
    NO_NEW_PRIVILEGES = "no_new_privileges"
    UNREADABLE = "unreadable"
    DIES_WITH_STARTER = "dies_with_starter"
    SECRET_MEMORY = "secret_memory"  # noqa: S105 - the name of a measure
    NO_SWAP = "no_swap"
    FILES = "files"
    SYSTEM_CALLS = "system_calls"


@dataclass(frozen=True)
class MeasureFinding:
    """A finding: whether one measure holds.

    Attributes:
        detail: How the measure was brought about, or why it could not be and what to do.
    """

    measure: Measure
    holds: bool
    detail: str


@dataclass(frozen=True)
class IsolationReport:
    """Every measure with its finding."""

    findings: tuple[MeasureFinding, ...]

    def missing_measures(self, required: Iterable[Measure]) -> tuple[MeasureFinding, ...]:
        """Return the required measures that do not hold or were not reported."""
        by_measure = {finding.measure: finding for finding in self.findings}
        asked = (
            by_measure.get(measure, MeasureFinding(measure, False, "nothing was reported about it"))
            for measure in required
        )
        return tuple(finding for finding in asked if not finding.holds)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "tier": LABEL,
            "measures": {
                finding.measure.value: {"holds": finding.holds, "detail": finding.detail} for finding in self.findings
            },
        }


def findings_from_json(value: dict[str, Any]) -> tuple[MeasureFinding, ...]:
    """Read the measures of `IsolationReport.to_json`."""
    measures = value["measures"]
    return tuple(
        MeasureFinding(Measure(name), finding["holds"] is True, str(finding["detail"]))
        for name, finding in measures.items()
    )
