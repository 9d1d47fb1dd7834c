"""The interface of every metrics sink, the facts of its run, and sinks of the user's own (``file.py:object``)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import AfterValidator, Field

from phalanx.config import StrictModel, check_methods, unfit_code_error
from phalanx.config.strict import check_reference
from phalanx.telemetry.histogram import Histogram

RunStatus = Literal["completed", "failed", "interrupted"]


class SinkSettings(StrictModel):
    """The keys of a metrics sink in a run file; each has its own beside these."""

    kind: str
    flush_s: float = Field(default=30.0, gt=0, le=600, allow_inf_nan=False)
    """Seconds that the end of a run waits for values on their way to the sink."""


@dataclass(frozen=True)
class TrackedRun:
    """Facts of the run for a sink.

    Attributes:
        id: Random name of the run, the same after a resume.
        name: The run file's name without its ending.
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

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take one point of each named curve; all numbers are finite."""

    def end(self, status: RunStatus) -> None:
        """Send the queued values, and close the run."""


@runtime_checkable
class HistogramSink(Protocol):
    """A sink that takes histograms too; others are sent curves alone."""

    def histogram(self, drawn: Histogram, step: int) -> None:
        """Take the histogram of one tensor at a step."""


_EXPECTED = "a metrics sink, with begin(run), scalars(values, step) and end(status)"


class OwnSinkConfig(SinkSettings):
    """A metrics sink of the user's own; what `kind` names is called with the options as keywords."""

    kind: Annotated[str, AfterValidator(check_reference)]
    options: dict[str, Any] = Field(default={})


def own_sink(kind: str, implementation: Any, config: OwnSinkConfig) -> Sink:
    """Make a sink from a reference."""
    check_own_sink(kind, implementation)
    instance = implementation(**config.options)
    check_methods(kind, instance, _EXPECTED, ("begin", "scalars", "end"))
    sink: Sink = instance
    return sink


def check_own_sink(kind: str, implementation: Any) -> None:
    """Return where an object may make a sink; a class is looked at without being called."""
    if not callable(implementation):
        raise unfit_code_error(
            kind, f"a {type(implementation).__name__}", "a class or function that makes a metrics sink"
        )
    if isinstance(implementation, type):
        check_methods(kind, implementation, _EXPECTED, ("begin", "scalars", "end"))
