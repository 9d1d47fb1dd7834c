"""The reputation of sites over rounds, and their exclusion with evidence.

One far update proves nothing: data of sites differ. A site with updates that stay far from what the robust rule makes
of all, round after round, loses its reputation; refusals at the door weigh more, since a signature shows them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.config import StrictModel


class ReputationConfig(StrictModel):
    """When a site is shut out.

    Attributes:
        far: An update is far when its distance to the result is so many times the middle distance.
        patience: Far updates in a row after which a site is shut out.
        refusals: Refused updates, signed by the site, after which it is shut out.
    """

    far: float = 2.0
    patience: int = 3
    refusals: int = 2


@dataclass
class SiteRecord:
    """What is held against one site, with the evidence.

    Attributes:
        far_in_a_row: Rounds.
        refusals: Signed updates that were refused.
        evidence: One line for each: round, reason or distance, and the signed header in hex.
    """

    far_in_a_row: int = 0
    refusals: int = 0
    evidence: list[dict[str, object]] = field(default_factory=list)


class SiteReputations:
    """The records of all sites of a run."""

    def __init__(self, config: ReputationConfig) -> None:
        self._config = config
        self.records: dict[str, SiteRecord] = {}

    def note_distances(self, number: int, distances: Mapping[str, float], headers: Mapping[str, bytes]) -> list[str]:
        """Take the distances of a round's updates to its result; return the sites that are to be shut out.

        Args:
            number: Of the round.
            distances: Of `distances_to`, by site.
            headers: The signed headers, by site.
        """
        middle = float(torch.tensor(sorted(distances.values())).median()) if distances else 0.0
        out = []
        for site, distance in distances.items():
            record = self.records.setdefault(site, SiteRecord())
            if distance <= self._config.far * middle:
                record.far_in_a_row = 0
                continue
            record.far_in_a_row += 1
            line = {"round": number, "distance": distance, "middle": middle, "header": headers[site].hex()}
            record.evidence.append(line)
            if record.far_in_a_row == self._config.patience:
                out.append(site)
        return out

    def note_refusal(self, number: int, site: str, reason: str, header: bytes) -> bool:
        """Take a refused update that the site has signed; tell whether the site is to be shut out."""
        record = self.records.setdefault(site, SiteRecord())
        record.refusals += 1
        record.evidence.append({"round": number, "reason": reason, "header": header.hex()})
        return record.refusals == self._config.refusals


def distances_to(result: Tensor, updates: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Euclidean distance of each site's update to the result."""
    return {site: float(torch.linalg.vector_norm(update - result)) for site, update in updates.items()}
