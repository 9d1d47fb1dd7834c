"""What is held against a site over rounds: signed updates that were refused, and rounds in which its update was far.

Only signed statements shut a site out. Distances never do: data of sites differ, so a far site may be an honest one,
and a liar could choose which honest site looks far. A robust rule withstands liars in each round without a verdict.
"""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

MAX_REFUSALS = 2
"""Refused updates that show a lie of their site, after which it is shut out."""
FAR = 2.0
"""An update is far when its distance to the result is so many times the median distance."""


class SiteRecords:
    """The records of all sites of a run.

    Attributes:
        far_rounds: Rounds in a row in which a site's update was far, for people to look at.
    """

    def __init__(self) -> None:
        self._refusals: Counter[str] = Counter()
        self.far_rounds: Counter[str] = Counter()

    def note_distances(self, distances: Mapping[str, float]) -> None:
        """Take the distances of a round's updates to its result, of `distances_to`."""
        median = float(torch.tensor(sorted(distances.values())).median()) if distances else 0.0
        for site, distance in distances.items():
            self.far_rounds[site] = self.far_rounds[site] + 1 if distance > FAR * median else 0

    def note_refusal(self, site: str) -> bool:
        """Take a refusal that shows a lie of the site; tell whether the site is to be shut out."""
        self._refusals[site] += 1
        return self._refusals[site] == MAX_REFUSALS


def distances_to(result: Tensor, updates: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Euclidean distance of each site's update to the result."""
    return {site: float(torch.linalg.vector_norm(update - result)) for site, update in updates.items()}
