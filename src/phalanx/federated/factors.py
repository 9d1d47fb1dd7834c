"""One update of the low-rank factors of many sites, of which the product is the mean of the sites' products."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from phalanx.federated.adapters import LowRank, mean_product, to_rank
from phalanx.federated.algorithms import Named

_A, _B = ".lora_A.weight", ".lora_B.weight"


def mean_of_products(before: Mapping[str, Tensor], deltas: Sequence[Named], weights: Sequence[float]) -> Named:
    """Return what the weights are to move by, so that adapters do the mean of what the sites' adapters do.

    Args:
        before: Weights that the updates are relative to; factors come in pairs.
        deltas: What each site's weights have moved by.
        weights: Of the sites.

    Guarantees:
        The product of each pair is the mean of the sites' products as nearly as the rank allows; the sites' ranks
        together are more than one adapter has. What is no factor moves by the mean.
    """
    total = sum(weights)
    update: Named = {}
    for name, now in before.items():
        if name.endswith(_A):
            pair = name.removesuffix(_A) + _B
            found = [LowRank(now + one[name], before[pair] + one[pair], 1.0) for one in deltas]
            nearest = to_rank(mean_product(found, weights), len(now), 1.0)
            update |= {name: nearest.a - now, pair: nearest.b - before[pair]}
        elif not name.endswith(_B):
            means = [one[name] * (weight / total) for one, weight in zip(deltas, weights, strict=True)]
            update[name] = sum(means[1:], means[0])
    return update
