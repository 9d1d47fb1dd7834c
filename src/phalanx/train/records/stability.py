"""Which batches would throw a model off: a robust score of loss and gradient norm, and the fault behind it.

Source: Chowdhery et al. 2022, section 5.1 (restart before the spike, pass the batches); Rousseeuw and Croux 1993 (the
median of absolute deviations as a scale).
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from phalanx.engine import NO_LIMITS, StepLimits
from phalanx.errors import SpikeError, TrainingError
from phalanx.train.train_section import StabilityConfig

Fault = Literal["data", "machine", "state"]
"""What a spike came from: the batch, a computation that differed when it was repeated, or the weights, their rate or
the code. A party that made it is convicted before there is a spike."""

_MIN_STEPS = 16
_NORMAL = 1.4826
"""Median absolute deviation of normal numbers, as a share of their standard deviation, inverted."""
_MIN_LOSS_SCALE, _MIN_NORM_SCALE = 0.01, 0.1
"""Smallest scale: a share of the median loss; of the logarithm of the norm."""


def robust_center(values: Iterable[float], min_scale: float) -> tuple[float, float]:
    """Return the median, and 1.4826 times the median of the distances from it, which is at least `min_scale`."""
    ordered = list(values)
    center = median(ordered)
    return center, max(_NORMAL * median(abs(value - center) for value in ordered), min_scale)


@dataclass
class SpikeScore:
    """Median and scale of the applied steps before the present one.

    A loss is measured from the lowest median so far, so that a slow rise is found as well; a norm, by its logarithm,
    from the median of the window, for honest norms wander.
    """

    rule: StabilityConfig
    losses: deque[float] = field(init=False)
    norms: deque[float] = field(init=False)
    lowest: tuple[float, float] | None = None
    """Lowest median of the losses, and their scale then."""

    def __post_init__(self) -> None:
        self.losses, self.norms = deque(maxlen=self.rule.window), deque(maxlen=self.rule.window)

    def add_step(self, loss: float, norm: float) -> None:
        """Take an applied step; numbers that are none, which some engines do not tell, are left out."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return
        self.losses.append(loss)
        self.norms.append(math.log(max(norm, 1e-300)))
        if len(self.losses) >= _MIN_STEPS:
            center, scale = robust_center(self.losses, _MIN_LOSS_SCALE * abs(median(self.losses)))
            if self.lowest is None or center < self.lowest[0]:
                self.lowest = center, scale

    def make_limits(self) -> StepLimits:
        """Return the limits of the next step; none before there are enough steps."""
        if self.lowest is None:
            return NO_LIMITS
        center, scale = robust_center(self.norms, _MIN_NORM_SCALE)
        max_log = min(center + self.rule.threshold * scale, 700.0)
        return StepLimits(self.lowest[0] + self.rule.threshold * self.lowest[1], math.exp(max_log))


class ReturnError(TrainingError):
    """The weights are to go back to the last checkpoint, and the batches since then are to be passed."""

    def __init__(self, spike: SpikeError, step: int) -> None:
        super().__init__(str(spike))
        self.step = step


@dataclass
class StabilityJudge:
    """The decisions about spikes in one session; all that they rest on is in `metrics.jsonl`.

    Args:
        max_failures: Returns to a checkpoint in a row, without a step beyond the place of the last spike.
        is_repeated: Whether the engine has repeated a spike, with audits, before it raises it.
    """

    rule: StabilityConfig
    max_failures: int
    is_repeated: bool
    spikes: list[SpikeError] = field(default_factory=list)
    """Those of the present step."""
    lowered_until: int = 0
    """The first step at the full rate again."""
    num_returns: int = 0
    returned_at: int = -1
    _tries: int = 0
    """How often the present batch was a spike."""
    _differs: bool = False
    """Whether it gave other numbers when it was tried again."""
    _was_new: bool = False
    """Whether another batch was drawn, or other weights were taken, after a spike of the present step."""

    def __post_init__(self) -> None:
        self.score = SpikeScore(self.rule)

    def load_steps(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take over the applied steps from lines of metrics, in place of all before."""
        self.score, self.lowered_until = SpikeScore(self.rule), 0
        for row in rows:
            loss, norm, step = row.get("loss"), row.get("grad_norm"), row.get("step")
            if isinstance(loss, float) and isinstance(norm, float) and isinstance(step, int):
                # one that was applied all the same was applied at the lower rate
                if self.score.make_limits().find_fault(step, loss, norm) is not None:
                    self.lowered_until = step + self.rule.rate_steps
                self.score.add_step(loss, norm)

    def forget_spikes(self) -> None:
        """Drop the spikes of the present step, which is not done next."""
        self.spikes, self._tries, self._differs = [], 0, False

    def make_limits(self, step: int) -> StepLimits:
        """Return the limits of a step."""
        is_lifted = self.rule.action == "lower_rate" and self._tries > (0 if self.is_repeated else 1)
        limits = NO_LIMITS if is_lifted else self.score.make_limits()
        return replace(limits, rate_factor=self.rule.rate_factor if step < self.lowered_until else 1.0)

    def begin_batch(self) -> None:
        """A batch was drawn."""
        self._was_new, self._tries = bool(self.spikes), 0
        self._differs = self._differs and self._was_new

    def decide_repeat(self, step: int, spike: SpikeError) -> bool:
        """Whether the same batch is tried again: once to see whether its numbers are the same; or at a lower rate."""
        if self._tries:
            self._differs = self._differs or _numbers_of(spike) != _numbers_of(self.spikes[-1])
        self.spikes.append(spike)
        self._tries += 1
        if self._tries == 1 and not self.is_repeated:
            return True
        if self.rule.action == "lower_rate":
            self.lowered_until = step + self.rule.rate_steps
            return True
        if self.rule.action == "roll_back":
            self.num_returns = self.num_returns + 1 if step <= self.returned_at else 1
            self.returned_at = max(step, self.returned_at)
            if self.num_returns <= self.max_failures:
                raise ReturnError(spike, step)
        return False

    def note_applied(self, step: int, loss: float, norm: float) -> dict[str, Any] | None:
        """Take an applied step.

        Returns:
            The body of the event `spike_attributed`; None where the step had no spike.
        """
        self.score.add_step(loss, norm)
        if not self.spikes:
            return None
        differs = self._differs or (not self._was_new and _numbers_of(self.spikes[-1]) != (loss, norm))
        fault: Fault = "machine" if differs else "data"
        body = self.attribute_spikes(step, fault, self.spikes)
        self.spikes, self._tries = [], 0
        return body

    def attribute_spikes(self, step: int, fault: Fault, spikes: list[SpikeError]) -> dict[str, Any]:
        """Return the body of the event that names the fault behind the spikes of a step, and how it is known."""
        again = "the batch gave the same numbers when it was computed again"
        reasons: dict[Fault, str] = {
            "data": f"{again}, and another batch did not" if self._was_new else again,
            "machine": "the same batch at the same weights gave other numbers when it was computed again",
            "state": "every batch at these weights was a spike",
        }
        return {
            "step": step,
            "fault": fault,
            "by": reasons[fault],
            "action": self.rule.action,
            "num_spikes": len(spikes),
            "loss": spikes[0].loss,
            "gradient_norm": spikes[0].gradient_norm,
        }


def _numbers_of(spike: SpikeError) -> tuple[float, float]:
    return spike.loss, spike.gradient_norm
