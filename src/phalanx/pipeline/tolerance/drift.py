"""Directed drift below the tolerance: cumulative sums of signed residuals along secret directions."""

import hashlib
import hmac
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from phalanx.config import canonical_json
from phalanx.planner.schedules import Direction

_WARM_UP = 32
_MEMORY = 256
_CLIP = 4.0
"""One audit counts at most so many sigma: a single far message is the tolerance's business, not the drift's."""

NOT_FINITE_SIGMAS = 1e6
"""The bias of a residual that is no number: more than any other one can have, and a number that JSON knows."""

_OVERSHOOT = 1.166
"""Siegmund's correction for the excess of a normal random walk over its two boundaries, 2 x 0.583."""


@dataclass(frozen=True)
class Drift:
    """A finding that the messages of one stage lean to one side.

    Attributes:
        bias_sigmas: Estimated mean of the residual there, in units of honest sigma, with its sign;
            `NOT_FINITE_SIGMAS` where a residual was not finite.
        num_audits: Audits since it began to lean.
    """

    stage: int
    direction: Direction
    projection: int
    bias_sigmas: float
    num_audits: int


class DriftWatch:
    """A detector of a bias that each single audit lets pass as rounding.

    A residual is averaged over tokens along a few secret directions, each of which has a two-sided CUSUM
    with allowance k and threshold h in units of honest sigma. Sigma is the scaled median deviation of the
    chart's own past, rounded up by two standard errors, unless calibration gave it.

    A `Drift` is a reason to look closer, not a verdict: audit every microbatch of the stage, and let the
    referee recompute in float64. The chart that found it starts again from zero.

    Guarantees:
        A constant bias of `smallest_bias` sigma along a secret direction shows after about
        ``(5 sigma / bias)^2`` audits (`expected_audits`), while honest noise, independent from audit to audit,
        raises one false alarm per stage and direction in `false_alarm_every` audits. Inside one numeric class
        honest residuals are exactly zero and so is every sum. Between bf16 paths honest rounding itself can lean
        by more than the allowance (docs/tolerance.md). Does not find a lie with an average over tokens
        and audits of zero along every fixed direction: a rescaled gradient, noise, a lie told once.

    Source: Page 1954, Continuous inspection schemes, Biometrika 41; run lengths after Siegmund 1985,
    Sequential analysis, section 2.
    """

    def __init__(
        self,
        key: bytes,
        *,
        smallest_bias: float = 0.5,
        false_alarm_every: int = 1_000_000,
        projections: int = 4,
        sigmas: Mapping[Direction, float] | None = None,
    ) -> None:
        """Watch every stage.

        Args:
            key: The owner's secret; a party that knows it can lie at a right angle to all directions.
            smallest_bias: Bias in sigma that is looked for; smaller ones take much longer.
            false_alarm_every: Audits of one stage and direction between two false alarms, on average.
            projections: Secret directions for each stage and direction.
            sigmas: Honest sigma of a projected residual, as `phalanx calibrate` measured it.
        """
        self.allowance = smallest_bias / 2
        self.threshold = _find_threshold(self.allowance, false_alarm_every * 2 * projections)
        self._key = key
        self._projections = projections
        self._sigmas = dict(sigmas or {})
        self._charts: dict[tuple[int, Direction, int], _Chart] = {}

    def add_residual(self, stage: int, direction: Direction, residual: Tensor) -> Drift | None:
        """Take one audit into account.

        Args:
            stage: The stage that sent the audited message.
            residual: Claimed minus recomputed, ``[batch, seq, dim]``, scaled per token: `token_residual`.

        Returns:
            The strongest drift that this audit completes, None as a rule.
        """
        drifts = []
        for n, score in enumerate(self.project_residual(stage, direction, residual)):
            if not math.isfinite(score):
                return Drift(stage, direction, n, NOT_FINITE_SIGMAS, 1)
            chart = self._charts.setdefault((stage, direction, n), _Chart())
            hit = chart.add_score(score, self.allowance, self.threshold, self._sigmas.get(direction))
            if hit is not None:
                drifts.append(Drift(stage, direction, n, *hit))
        return max(drifts, key=lambda drift: abs(drift.bias_sigmas), default=None)

    def project_residual(self, stage: int, direction: Direction, residual: Tensor) -> list[float]:
        """Mean over tokens of the residual along each secret direction.

        Args:
            residual: ``[batch, seq, dim]``.
        """
        mean = residual.detach().cpu().double().flatten(0, -2).mean(dim=0)
        return [
            float(mean @ self._secret_direction(stage, direction, n, mean.numel())) for n in range(self._projections)
        ]

    def expected_audits(self, bias_sigmas: float) -> float:
        """Audits until a constant bias shows in one chart, on average; the warm-up's are among them."""
        return run_length(bias_sigmas, self.allowance, self.threshold)

    def _secret_direction(self, stage: int, direction: Direction, projection: int, dim: int) -> Tensor:
        """A unit vector ``[dim]`` that is made anew each time; normal, so that no direction is preferred."""
        domain = canonical_json(["drift", stage, direction, projection, dim])
        # a stream of the whole key: torch's generator would keep 32 bits of it
        stream = bytearray(hashlib.shake_256(hmac.digest(self._key, domain, "sha256")).digest(2 * dim))
        uniform = (torch.frombuffer(stream, dtype=torch.int16).double() + 0.5) / 2**15
        normal = torch.erfinv(uniform)
        unit: Tensor = normal / normal.norm()
        return unit


@dataclass
class _Side:
    """One half of a chart: the sum, and audits since it was last zero."""

    level: float = 0.0
    audits: int = 0

    def add_step(self, step: float) -> None:
        self.level = max(0.0, self.level + step)
        self.audits = self.audits + 1 if self.level > 0 else 0


@dataclass
class _Chart:
    """A two-sided CUSUM that scales itself by its own past."""

    up: _Side = field(default_factory=_Side)
    down: _Side = field(default_factory=_Side)
    past: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))

    def add_score(
        self, score: float, allowance: float, threshold: float, sigma: float | None
    ) -> tuple[float, int] | None:
        """Take one score; the bias in sigma and the audits it took when a side crosses the threshold."""
        if sigma is None and len(self.past) < _WARM_UP:
            self.past.append(score)
            if len(self.past) < _WARM_UP:
                return None
            pending, sigma = list(self.past), self._estimate_sigma()
        else:
            pending, sigma = [score], self._estimate_sigma() if sigma is None else sigma
            self.past.append(score)
        hit = None
        for value in pending:
            hit = self._advance_sides(_in_sigmas(value, sigma), allowance, threshold) or hit
        return hit

    def _advance_sides(self, z: float, allowance: float, threshold: float) -> tuple[float, int] | None:
        for sign, side in ((1.0, self.up), (-1.0, self.down)):
            side.add_step(sign * z - allowance)
            if side.level > threshold:
                bias, audits = sign * (allowance + side.level / side.audits), side.audits
                self.up, self.down = _Side(), _Side()
                return bias, audits
        return None

    def _estimate_sigma(self) -> float:
        middle = median(self.past)
        deviation = 1.4826 * median(abs(value - middle) for value in self.past)
        return deviation * (1.0 + 2.0 / math.sqrt(len(self.past)))


def run_length(bias: float, allowance: float, threshold: float) -> float:
    """Average number of observations until a one-sided CUSUM of normal noise crosses its threshold.

    Args:
        bias: Mean of the observations, in sigma; 0 gives the distance between false alarms.

    Source: Siegmund 1985, Sequential analysis, section 2.6.
    """
    drift, height = bias - allowance, threshold + _OVERSHOOT
    x = 2.0 * drift * height
    if abs(x) < 1e-6:
        return height * height
    return (math.expm1(-x) + x) / (2.0 * drift * drift)


def _find_threshold(allowance: float, num_observations: int) -> float:
    """The threshold that noise alone crosses once in so many observations."""
    low, high = 0.0, 1.0
    while run_length(0.0, allowance, high) < num_observations:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if run_length(0.0, allowance, middle) < num_observations else (low, middle)
    return high


def _in_sigmas(value: float, sigma: float) -> float:
    if sigma > 0:
        return min(max(value / sigma, -_CLIP), _CLIP)
    # honest bits were equal so far: any difference counts in full
    return math.copysign(_CLIP, value) if value else 0.0
