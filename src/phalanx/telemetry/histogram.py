"""The histogram of one tensor of a model, as figures that a line of metrics or a tracker takes."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

HistogramOf = Literal["weights", "gradients"]


@dataclass(frozen=True)
class Histogram:
    """The number of a tensor's values in equal bins between its least and its greatest one.

    Attributes:
        of: Its weights, or the optimizer's running mean of their gradients.
        low: Left end of the first bin.
        high: Right end of the last one.
        counts: Values in each bin; the last one has its right end too.
        not_finite: Values that are NaN or infinite, and in no bin.
    """

    of: HistogramOf
    name: str
    low: float
    high: float
    counts: tuple[int, ...]
    not_finite: int = 0

    @property
    def tag(self) -> str:
        """Its name among the curves of a run."""
        return f"{self.of}/{self.name}"

    @property
    def edges(self) -> list[float]:
        """Both ends of every bin, one more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + width * place for place in range(len(self.counts))] + [self.high]

    def metrics_row(self) -> dict[str, Any]:
        """The entry in a step's line of the metrics."""
        return {**asdict(self), "counts": list(self.counts)}
