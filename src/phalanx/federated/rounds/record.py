"""What a round came to, for the metrics: which sites took part, with what, and why others did not."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class SiteShare:
    """The part of one site in one round.

    Attributes:
        loss: Mean training loss, as the site says; None where it does not.
        num_targets: As the site says.
        samples: Its weight.
        norm: Of its update; None where updates are summed and none is seen.
        scaled: What the site says that it multiplied the update with; None where it does not say.
        train_s: Seconds of training, as the site says.
        behind: Rounds that its update is behind.
    """

    loss: float | None
    num_targets: int
    samples: int
    norm: float | None
    scaled: float | None
    train_s: float
    behind: int = 0


@dataclass
class RoundRecord:
    """One round.

    Attributes:
        number: From 1.
        asked: The sites of the round.
        shares: Those that counted, by name.
        left_out: The others that were asked, with reasons.
        norm: Of what the weights moved by.
        sums: Numbers of secure sums.
        bytes: Payloads of each site, both ways.
        charge: Number of the charge of its sums; None without a privacy budget.
    """

    number: int
    asked: tuple[str, ...]
    shares: dict[str, SiteShare] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    norm: float = 0.0
    sums: tuple[int, ...] = ()
    bytes: dict[str, int] = field(default_factory=dict)
    charge: int | None = None

    @property
    def loss(self) -> float:
        """Mean training loss over all targets; no number where sites do not tell, or told an owner that was killed."""
        total = sum(one.loss * one.num_targets for one in self.shares.values() if one.loss is not None)
        return total / self.num_targets if self.num_targets else math.nan

    @property
    def num_targets(self) -> int:
        """Of all sites that counted."""
        return sum(one.num_targets for one in self.shares.values())

    def row(self) -> dict[str, Any]:
        """The line of the metrics."""
        return {
            name: {**vars(self.shares[name])} if name in self.shares else {"left_out": self.left_out.get(name, "")}
            for name in sorted({*self.asked, *self.shares, *self.left_out})
        }


@dataclass(frozen=True)
class HeldUpdate:
    """An update that was let in.

    Attributes:
        round: That it was trained in.
        header: Signed; evidence of what the site sent.
        vector: Its values.
        share: What is told of it.
    """

    round: int
    header: bytes
    vector: Tensor
    share: SiteShare
