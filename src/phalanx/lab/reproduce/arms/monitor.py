"""Monitoring by statistics alone: moving averages of each stage's messages, thresholds from an honest warm-up."""

import math
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_SETTLED = 8
_WINDOW = 128


@dataclass(frozen=True)
class _Profile:
    """The profile of a message: log of its root mean square, channel means, quantiles in units of the former."""

    log_rms: float
    channels: Tensor
    quantiles: Tensor


@dataclass
class _Average:
    """The moving average of one kind of message, and how far honest ones were from it."""

    seen: int = 0
    profile: _Profile | None = None
    limits: dict[str, float] = field(default_factory=dict)
    recent: dict[str, deque[float]] = field(default_factory=dict)


class StatisticsMonitor:
    """A detector by four distances of a message to the moving average of its kind, each with its own threshold.

    ``scale`` is the difference of the logs of the norms, ``direction`` one minus the cosine of the channel means,
    ``signs`` the share of clear channels that have a mean of the other sign, ``shape`` the mean difference of the
    quantiles. A threshold is `margin` times the largest distance of the honest warm-up, or, where it is higher,
    the upper quartile of the last accepted distances plus three times their spread between the quartiles, so that
    it follows a model that moves. Only what was accepted enters an average.

    Guarantees:
        NaN and infinity never pass. Once warmed up, finds lies that change one of the four by more than the model's
        own movement. Does not find stale, small or well-shaped lies, and can accuse an honest stage; nothing that
        it says is a proof.

    Source: after the idea of Sentinel (arXiv 2603.03592); an own implementation, for its code is not public.
    """

    def __init__(self, *, decay: float = 0.9, margin: float = 2.0) -> None:
        self._decay = decay
        self._margin = margin
        self._averages: dict[tuple[int, str], _Average] = {}

    def learn_message(self, source: int, direction: str, tensor: Tensor) -> None:
        """Take a message ``[batch, seq, dim]`` of the honest warm-up."""
        average = self._averages.setdefault((source, direction), _Average())
        profile = _profile_tensor(tensor)
        if average.profile is not None and average.seen >= _SETTLED:
            for name, distance in _profile_distances(profile, average.profile).items():
                average.limits[name] = max(average.limits.get(name, 0.0), distance)
                average.recent.setdefault(name, deque(maxlen=_WINDOW)).append(distance)
        self._update_average(average, profile)

    def reset_averages(self) -> None:
        """Forget the averages and keep the thresholds: the model has gone back to where the warm-up began."""
        for average in self._averages.values():
            average.seen, average.profile = 0, None

    def judge_message(self, source: int, direction: str, tensor: Tensor) -> str | None:
        """Judge one message.

        Returns:
            None when it resembles earlier messages, else the unusual property. A kind of message that was not in the
            warm-up is only asked to be finite.
        """
        if not bool(torch.isfinite(tensor).all()):
            return "not finite"
        average = self._averages.setdefault((source, direction), _Average())
        profile = _profile_tensor(tensor)
        distances = {} if average.profile is None else _profile_distances(profile, average.profile)
        for name, distance in distances.items():
            if name in average.limits and not distance <= self._distance_limit(average, name):
                return f"{name}: distance {distance:.3g}, allowed {self._distance_limit(average, name):.3g}"
        for name, distance in distances.items():
            average.recent.setdefault(name, deque(maxlen=_WINDOW)).append(distance)
        self._update_average(average, profile)
        return None

    def _distance_limit(self, average: _Average, name: str) -> float:
        ordered = sorted(average.recent[name])
        low, high = ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]
        return max(self._margin * average.limits[name], high + 3.0 * (high - low))

    def _update_average(self, average: _Average, new: _Profile) -> None:
        old = average.profile or new
        # until it is settled, the plain mean of what was seen
        weight = max(1.0 - self._decay, 1.0 / (average.seen + 1))
        average.profile = _Profile(
            log_rms=old.log_rms + weight * (new.log_rms - old.log_rms),
            channels=torch.lerp(old.channels, new.channels, weight),
            quantiles=torch.lerp(old.quantiles, new.quantiles, weight),
        )
        average.seen += 1


def _profile_tensor(tensor: Tensor) -> _Profile:
    x = tensor.detach().float()
    rms = float(torch.linalg.vector_norm(x)) / math.sqrt(max(x.numel(), 1))
    scaled = x.reshape(-1) / max(rms, 1e-30)
    return _Profile(
        log_rms=math.log(max(rms, 1e-30)),
        channels=x.mean(dim=(0, 1)) / max(rms, 1e-30),
        quantiles=torch.quantile(scaled, torch.tensor(_QUANTILES)),
    )


def _profile_distances(found: _Profile, usual: _Profile) -> dict[str, float]:
    clear = usual.channels.abs() >= usual.channels.abs().median()
    flipped = torch.sign(found.channels[clear]) != torch.sign(usual.channels[clear])
    return {
        "scale": abs(found.log_rms - usual.log_rms),
        "direction": 1.0 - float(torch.nn.functional.cosine_similarity(found.channels, usual.channels, dim=0)),
        "signs": float(flipped.float().mean()),
        "shape": float((found.quantiles - usual.quantiles).abs().mean()),
    }
