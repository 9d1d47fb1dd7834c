"""The differences of many compared messages, token by token and at worst."""

from dataclasses import dataclass, field
from statistics import fmean, median

import torch
from torch import Tensor

from phalanx.errors import NonFiniteLossError
from phalanx.pipeline import token_distances

_TOKENS_KEPT = 256
"""Of one message, for the quantiles; maximum and mean are over all of its tokens."""

_QUANTILES = {"q50": 0.5, "q90": 0.9, "q99": 0.99, "q999": 0.999}

Figures = dict[str, int | float | None]


@dataclass
class Differences:
    """Distances between two computations of the same messages.

    Attributes:
        maxima: Largest token distance of each message.
        num_equal: Messages with the same bits.
    """

    maxima: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_equal: int = 0
    _total: float = 0.0
    _kept: list[Tensor] = field(default_factory=list)

    def add_message(self, claimed: Tensor, reference: Tensor, where: str) -> None:
        """Compare one message.

        Args:
            claimed: ``[batch, seq, dim]``.
        """
        claimed, reference = claimed.detach().cpu(), reference.detach().cpu()
        distances = token_distances(claimed, reference).flatten()
        largest = float(distances.max())
        if not largest < float("inf"):
            raise NonFiniteLossError(f"calibrate: {where}: an honest message holds NaN or infinity; lower optimizer.lr")
        self.maxima.append(largest)
        self.num_tokens += distances.numel()
        self.num_equal += claimed.dtype == reference.dtype and torch.equal(claimed, reference)
        self._total += float(distances.sum())
        self._kept.append(distances[:: max(1, distances.numel() // _TOKENS_KEPT)].float())

    def difference_figures(self) -> Figures:
        """Counts, and distances over tokens; None where nothing was compared."""
        figures: Figures = {"num_messages": len(self.maxima), "num_tokens": self.num_tokens}
        if not self.maxima:
            return figures | dict.fromkeys(("share_bit_equal", "mean", *_QUANTILES, "median_of_maxima", "max"))
        quantiles = torch.quantile(torch.cat(self._kept), torch.tensor(list(_QUANTILES.values())))
        figures |= {"share_bit_equal": self.num_equal / len(self.maxima), "mean": self._total / self.num_tokens}
        figures |= {name: float(value) for name, value in zip(_QUANTILES, quantiles, strict=True)}
        return figures | {"median_of_maxima": median(self.maxima), "max": max(self.maxima)}


@dataclass
class ResidualLean:
    """Projected residuals of one direction of messages: how large honest noise is there, and how one-sided.

    `scores` has one list for each stage and secret direction.
    """

    scores: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    num_alarms: int = 0

    def add_scores(self, stage: int, projected: list[float]) -> None:
        """Take the projections of one message's residual."""
        for n, score in enumerate(projected):
            self.scores.setdefault((stage, n), []).append(score)

    def lean_figures(self) -> Figures:
        """Median over charts of sigma, and the largest mean in units of its chart's sigma; None without noise."""
        sigmas, biases = [], []
        for scores in self.scores.values():
            centre = median(scores)
            sigma = 1.4826 * median(abs(score - centre) for score in scores)
            if sigma > 0.0:
                sigmas.append(sigma)
                biases.append(abs(fmean(scores)) / sigma)
        return {
            "projected_sigma": median(sigmas) if sigmas else None,
            "projected_bias_sigmas": max(biases) if biases else None,
            "drift_alarms": self.num_alarms,
        }
