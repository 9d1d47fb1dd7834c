"""Centred clipping: a mean in which no update pulls farther than a radius."""

import torch
from torch import Tensor

from phalanx.aggregators.median import median_update

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
