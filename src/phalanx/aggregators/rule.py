"""The interface of robust rules, and the distances that several of them need."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import ConfigError


def mean_update(updates: Tensor, byzantine: int) -> Tensor:
    """Return the mean of all updates."""
    return updates.mean(0)


TURNS = 5


def centered_clipping(updates: Tensor, byzantine: int) -> Tensor:
    """Return the clipped mean around the median of each value, with the middle distance to it as radius.

    Source: Karimireddy et al. 2021; centre and radius come from the updates here, so that no run has to guess them.
    """
    centre = median_update(updates, byzantine)
    radius = float(torch.linalg.vector_norm(updates - centre, dim=1).median())
    return clip_around(updates, centre, radius, TURNS)


def clip_around(updates: Tensor, centre: Tensor, radius: float, turns: int) -> Tensor:
    """Return where a centre moves to when it goes, turn by turn, by the mean of differences cut to a radius."""
    for _ in range(turns):
        differences = updates - centre
        norms = torch.linalg.vector_norm(differences, dim=1)
        shares = (radius / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)
        centre = centre + shares @ differences / len(updates)
    return centre


Rule = Callable[[Tensor, int], Tensor]
"""Takes updates ``[clients, values]``, finite, in a floating type, and how many of them may be Byzantine; returns one
update ``[values]``."""

CHUNK = 2**20
"""Values that are worked on at once where a rule looks at each by itself."""


@dataclass(frozen=True)
class Aggregator:
    """A robust rule and how much it stands."""

    rule: Rule
    max_byzantine: Callable[[int], int]
    source: str

    def __call__(self, updates: Tensor, byzantine: int) -> Tensor:
        """Aggregate after a look at whether the rule can do so."""
        if updates.ndim != 2 or not len(updates) or not updates.is_floating_point():
            raise ConfigError(f"updates: {updates.dtype}{list(updates.shape)}, expected a float matrix, a row a client")
        self.check_byzantine(len(updates), byzantine)
        if not torch.isfinite(updates).all():
            raise ConfigError("updates: one holds NaN or infinity; admission must refuse it before any statistics")
        return self.rule(updates, byzantine)

    def check_byzantine(self, clients: int, byzantine: int) -> None:
        """Return where the rule stands so many liars of so many clients."""
        if not 0 <= byzantine <= (max_byzantine := self.max_byzantine(clients)):
            raise ConfigError(
                f"byzantine = {byzantine} of {clients} clients: this rule stands {max_byzantine} at most; "
                "lower it, ask more clients, or choose another rule"
            )


def below_half(clients: int) -> int:
    """Return the most Byzantine clients of a rule that stands less than half."""
    return (clients - 1) // 2


def inner_products(updates: Tensor) -> Tensor:
    """Return ``[clients, clients]`` inner products of the updates without their common middle, in float64.

    The middle is the median of each value: what most updates share then costs no precision, however large a few are.
    """
    gram = torch.zeros(len(updates), len(updates), dtype=torch.float64, device=updates.device)
    for part in torch.split(updates, CHUNK, dim=1):
        centred = part.double() - part.median(0).values.double()
        gram += centred @ centred.T
    return gram


def squared_distances(updates: Tensor) -> Tensor:
    """Return ``[clients, clients]`` squared Euclidean distances, in float64."""
    gram = inner_products(updates)
    norms = gram.diagonal()
    return (norms[:, None] + norms[None, :] - 2 * gram).clamp_(min=0).fill_diagonal_(0)


def weighted_mean(updates: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of updates with weights that need not add up to one."""
    return (weights / weights.sum()).to(updates.dtype) @ updates


def by_column(updates: Tensor, action: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply to each chunk of columns what looks at each column by itself."""
    return torch.cat([action(part) for part in torch.split(updates, CHUNK, dim=1)])


def median_update(updates: Tensor, byzantine: int) -> Tensor:
    """Return the median of each value; of an even number of clients the mean of the two in the middle.

    Source: Yin et al. 2018.
    """
    half = len(updates) // 2

    def middle(part: Tensor) -> Tensor:
        ordered = torch.sort(part, dim=0).values
        return ordered[half] if len(part) % 2 else (ordered[half - 1] + ordered[half]) / 2

    return by_column(updates, middle)


def trimmed_mean(updates: Tensor, byzantine: int) -> Tensor:
    """Return the mean of each value after as many as may be Byzantine are cut off at either end.

    Source: Yin et al. 2018.
    """
    return by_column(updates, lambda part: torch.sort(part, dim=0).values[byzantine : len(part) - byzantine].mean(0))


_MAX_TURNS = 2000
_MIN_CHANGE = 1e-9
_NEAREST = 1e-12


def geometric_median(updates: Tensor, byzantine: int) -> Tensor:
    """Return the geometric median, by Weiszfeld's iteration.

    Each turn takes a mean of the updates with the inverse distances as weights, distances below 1e-12 of the largest
    counted as that; it ends when no weight changes by 1e-9. Distances come from the inner products, so that a turn
    costs nothing that grows with the values.

    Source: Weiszfeld 1937; Pillutla et al. 2022 (RFA).
    """
    gram = inner_products(updates)
    weights = torch.full((len(updates),), 1 / len(updates), dtype=torch.float64, device=updates.device)
    for _ in range(_MAX_TURNS):
        to_all = gram @ weights
        distances = (gram.diagonal() - 2 * to_all + weights @ to_all).clamp(min=0).sqrt()
        if not (largest := float(distances.max())):
            break
        before, weights = weights, 1 / distances.clamp(min=largest * _NEAREST)
        weights = weights / weights.sum()
        if float((weights - before).abs().max()) < _MIN_CHANGE:
            break
    return weighted_mean(updates, weights)


def caf_mean(updates: Tensor, byzantine: int) -> Tensor:
    """Return, of the weighted means on the way, the one around which the updates vary least.

    While more than n - 2f of the weight is left, each update loses weight by its squared projection on the principal
    direction of the weighted covariance. The direction is exact, by the n x n matrix of inner products, where the
    authors take a step of power iteration.

    Source: Allouah et al. 2025 (CAF).
    """
    gram = inner_products(updates)
    weights = torch.ones(len(updates), dtype=torch.float64, device=updates.device)
    best, least = weights, float("inf")
    while float(weights.sum()) > max(len(updates) - 2 * byzantine, 0.5):
        share = weights / weights.sum()
        # inner products of what is left when the weighted mean is taken away
        moved = gram - (gram @ share)[:, None] - (share @ gram)[None, :] + share @ gram @ share
        root = share.sqrt()
        values, vectors = torch.linalg.eigh(root[:, None] * moved * root[None, :])
        if float(values[-1]) < least:
            best, least = weights, float(values[-1])
        projections = (moved @ (root * vectors[:, -1])) ** 2
        # of an update without weight the projection would only slow the others down
        largest = float(projections[weights > 0].max())
        if largest <= 0:
            break
        weights = weights * (1 - projections / largest).clamp(min=0)
    return weighted_mean(updates, best)


def krum_update(updates: Tensor, byzantine: int) -> Tensor:
    """Return the one update that is nearest to the others.

    Source: Blanchard et al. 2017.
    """
    return updates[_krum_scores(updates, byzantine).argmin()].clone()


def multi_krum(updates: Tensor, byzantine: int) -> Tensor:
    """Return the mean of all but as many updates as may be Byzantine, those with the farthest neighbours.

    Source: Blanchard et al. 2017.
    """
    nearest = torch.sort(_krum_scores(updates, byzantine), stable=True).indices[: len(updates) - byzantine]
    return updates[nearest.sort().values].mean(0)


def max_krum_byzantine(clients: int) -> int:
    """Return how many Krum stands: n must be 2f + 3 at least."""
    return max(0, (clients - 3) // 2)


def _krum_scores(updates: Tensor, byzantine: int) -> Tensor:
    """Return for each update the sum of squared distances to its n - f - 1 nearest others."""
    ordered = squared_distances(updates).sort(dim=1).values
    # the first is the distance to itself
    return ordered[:, 1 : max(2, len(updates) - byzantine)].sum(1)


MAX_SUBSETS = 200_000


def mda_mean(updates: Tensor, byzantine: int) -> Tensor:
    """Return the mean of the n - f updates of which the two farthest are nearest; of equal ones the first.

    Source: El-Mhamdi et al. 2021 (minimum-diameter averaging).
    """
    distances = squared_distances(updates).cpu()
    num_honest = len(updates) - byzantine
    best, least = tuple(range(num_honest)), float("inf")
    for subset in itertools.combinations(range(len(updates)), num_honest):
        chosen = torch.tensor(subset)
        widest = float(distances[chosen[:, None], chosen].max())
        if widest < least:
            best, least = subset, widest
    return updates[list(best)].mean(0)


def max_mda_byzantine(clients: int) -> int:
    """Return how many MDA stands while it looks at 200,000 subsets at most."""
    return max((few for few in range(below_half(clients) + 1) if math.comb(clients, few) <= MAX_SUBSETS), default=0)


PreStep = Callable[[Tensor, int, torch.Generator], tuple[Tensor, int]]
"""Takes updates, how many may be Byzantine, and a source of chance; returns other updates and how many of those may be
Byzantine."""


def nearest_neighbour_mixing(updates: Tensor, byzantine: int, chance: torch.Generator) -> tuple[Tensor, int]:
    """Replace each update by the mean of the n - f that are nearest to it, itself among them.

    Source: Allouah et al. 2023 (NNM).
    """
    num_near = len(updates) - byzantine
    if num_near < 1:
        raise ConfigError(f"byzantine = {byzantine} of {len(updates)} clients: nnm has nobody to mix; ask more clients")
    nearest = squared_distances(updates).sort(dim=1, stable=True).indices[:, :num_near]
    shares = torch.zeros(len(updates), len(updates), dtype=updates.dtype, device=updates.device)
    return shares.scatter_(1, nearest, 1 / num_near) @ updates, byzantine


def bucket_updates(updates: Tensor, byzantine: int, chance: torch.Generator) -> tuple[Tensor, int]:
    """Replace updates by the means of random pairs; of an odd number the last stays alone.

    Source: Karimireddy et al. 2022 (s = 2).
    """
    order = torch.randperm(len(updates), generator=chance).to(updates.device)
    return torch.stack([updates[pair].mean(0) for pair in torch.split(order, 2)]), byzantine
