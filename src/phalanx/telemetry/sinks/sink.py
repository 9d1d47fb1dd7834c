"""The interface of every metrics sink, and what it is told of its run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.telemetry.histogram import Histogram

RunStatus = Literal["completed", "failed", "interrupted"]


class SinkSettings(StrictModel):
    """The keys of a metrics sink in a run file; each has its own beside these."""

    kind: str
    flush_s: float = Field(default=30.0, gt=0, le=600, allow_inf_nan=False)
    """How long the end of a run waits for what is still under way to the sink, seconds."""


@dataclass(frozen=True)
class TrackedRun:
    """What a sink is told of the run.

    Attributes:
        id: Random name of the run, the same after a resume.
        name: The run file's name without its ending.
        directory: A folder of the sink's own in the run directory.
        config: The run file, a value for each ``section.key``.
    """

    id: str
    name: str
    directory: str
    config: Mapping[str, str | int | float | bool | None]


class Sink(Protocol):
    """A sink in a process of its own; whatever it raises ends it and never the run."""

    def begin(self, run: TrackedRun) -> None:
        """Open the run, or open it again after a resume."""
        ...

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take one point of each named curve; all numbers are finite."""
        ...

    def end(self, status: RunStatus) -> None:
        """Send what is left, and close the run."""
        ...


@runtime_checkable
class HistogramSink(Protocol):
    """A sink that takes histograms too; others are sent curves alone."""

    def histogram(self, drawn: Histogram, step: int) -> None:
        """Take the histogram of one tensor at a step."""
        ...
