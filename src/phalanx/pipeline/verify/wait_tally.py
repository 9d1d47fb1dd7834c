"""The tally of a long step's waits, at moments that no worker knows beforehand."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.carried_frames import PartyLink

LOOKS_PER_STEP = 16
"""Looks in the time that a step may take, on average."""


@dataclass(frozen=True)
class Waits:
    """What a step waits for at one moment: parties that have all they need, and links with something under way."""

    parties: Collection[str] = ()
    links: Collection[PartyLink] = ()


@dataclass
class WaitTally:
    """How often an attempt at a step was seen to wait for each party and each link.

    A party that delays each of its messages by a little less than patience is never silent, and yet all wait for it
    most of the time.
    """

    parties: Counter[str] = field(default_factory=Counter)
    links: Counter[PartyLink] = field(default_factory=Counter)

    def add_waits(self, waits: Waits) -> None:
        """Count one look."""
        self.parties.update(waits.parties)
        self.links.update(waits.links)

    def most_awaited_links(self) -> list[PartyLink]:
        """The links that the step has waited for most; empty where it has waited more for one party.

        Of a link the owner cannot tell which end delays it, so no end pays before the link has been led.
        """
        return sorted(self.links) if self.links.total() > max(self.parties.values(), default=0) else []

    def find_debtor(self) -> str | None:
        """Return the worker that the step has waited for most; None where that is the owner, or no party is."""
        max_waits = max(self.parties.values(), default=0)
        debtors = sorted(party for party, number in self.parties.items() if number == max_waits)
        return None if OWNER in debtors or not debtors else debtors[0]
