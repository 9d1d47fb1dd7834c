"""FedBuff: a round is the first updates that come; one that is rounds behind counts for less."""

import math


def staleness_weight(rounds_behind: int) -> float:
    """Return what an update that is so many rounds behind counts for.

    Source: Nguyen et al. 2022, ``1 / sqrt(1 + tau)``.
    """
    return 1.0 / math.sqrt(1.0 + rounds_behind)
