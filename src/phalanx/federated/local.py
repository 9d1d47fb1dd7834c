"""The interface between a site's rounds and what trains there: weights go in, an update and its weight come out.

What is to happen to an update before it leaves a site (noise, another clipping) is a `LocalTrainer` around another one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigError
from phalanx.federated.algorithms import LocalRule, Named
from phalanx.federated.vectors import shapes_of


@dataclass(frozen=True)
class SpentRows:
    """The spent budget of one site's private rows.

    Attributes:
        epsilon: A bound of it, within the budget.
        rounds_left: Further rounds that the budget pays for.
    """

    epsilon: float
    rounds_left: int


@dataclass(frozen=True)
class LocalUpdate:
    """A site's result of training one round.

    Attributes:
        delta: Movement of its weights, by name.
        samples: Training sequences that the site has: its weight, where sites do not count the same.
        loss: Mean over the targets of the round, in nats, as it was before each step; None of private rows, of which
            it would tell without noise.
        num_targets: Targets of the round; 0 of private rows.
        spent: Spent budget of the site's private rows; None where rows are not private.
    """

    delta: Named
    samples: int
    loss: float | None
    num_targets: int
    steps: int
    spent: SpentRows | None = None


@dataclass(frozen=True)
class SiteScores:
    """A model's scores on a site's own held-out rows.

    Attributes:
        loss: Loss summed over all targets, in nats.
        num_targets: Number of targets that `loss` is summed over.
        classes: For each class: its texts, texts that were classified as it, and right ones; empty without a
            classification.
    """

    loss: float
    num_targets: int
    classes: tuple[tuple[int, int, int], ...] = ()


class LocalTrainer(Protocol):
    """The interface of local training, with the model in memory from round to round."""

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each tensor that is trained."""

    def train_round(self, number: int, start: Mapping[str, Tensor], rate: float, rule: LocalRule) -> LocalUpdate:
        """Train one round; the same arguments give the same update, but for private rows, which are drawn anew."""

    def measure_weights(self, weights: Mapping[str, Tensor]) -> SiteScores:
        """Measure weights on the site's own held-out rows."""


_KEPT = 64
_SHOWN = 4


def personal_names(trained: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """Return the names that stay at a site.

    Args:
        trained: Names of all weights that are trained.

    Raises:
        ConfigError: A pattern matches none of them, or nothing is left that sites would share.
    """
    names = sorted(trained)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            shown = ", ".join([*names[:_SHOWN], *(["..."] if len(names) > _SHOWN else [])])
            raise ConfigError(f'federated.personal: "{pattern}" matches no trained weight; weights: {shown}')
    personal = frozenset(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    if len(personal) == len(names):
        raise ConfigError("federated.personal: matches all trained weights, so sites would share none; name fewer")
    return personal


class RoundWeights:
    """Weights that stay at one site, a file for each of the latest rounds that it has trained.

    Guarantees:
        A round that is trained again begins with the same weights as before: later rounds change no earlier file.
    """

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._directory, self._shapes = directory, dict(shapes)
        directory.mkdir(parents=True, exist_ok=True)

    def load_counted(self, number: int) -> Named:
        """Return them as a round has left them in which the site's update has counted; zeros before the first."""
        if not number:
            return {name: torch.zeros(shape) for name, shape in self._shapes.items()}
        if number not in self._stored_rounds():
            raise CheckpointError(
                f"{self._round_path(number)}: missing, and the site's update of that round has counted; put its "
                "directory back, or begin the run again"
            )
        return self._read_round(number)

    def load_before(self, number: int) -> Named | None:
        """Return them as they were before a round; None where the site has trained no earlier one."""
        earlier = [earlier_round for earlier_round in self._stored_rounds() if earlier_round < number]
        return self._read_round(earlier[-1]) if earlier else None

    def load_latest(self) -> Named | None:
        """Return them as they are now; None before the first round."""
        rounds = self._stored_rounds()
        return self._read_round(rounds[-1]) if rounds else None

    def save_round(self, number: int, weights: Named) -> None:
        """Keep them as a round has left them; later rounds that are done again go."""
        path = self._round_path(number)
        beside = path.with_suffix(".tmp")
        save_file(weights, beside)
        beside.replace(path)
        rounds = self._stored_rounds()
        for old_round in [*[old for old in rounds if old > number], *rounds[:-_KEPT]]:
            self._round_path(old_round).unlink(missing_ok=True)

    def _stored_rounds(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("round-")) for path in self._directory.glob("round-*.safetensors"))

    def _round_path(self, number: int) -> Path:
        return self._directory / f"round-{number}.safetensors"

    def _read_round(self, number: int) -> Named:
        try:
            weights: Named = load_file(self._round_path(number))
        except (SafetensorError, OSError) as exc:
            raise CheckpointError(
                f"{self._round_path(number)}: cannot be read; remove it to use the round before"
            ) from exc
        if shapes_of(weights) != dict(sorted(self._shapes.items())):
            raise CheckpointError(f"{self._round_path(number)}: has other weights than this run; begin the run again")
        return weights
