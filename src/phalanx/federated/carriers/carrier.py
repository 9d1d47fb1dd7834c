"""The port between rounds and what carries them: four calls, which every carrier has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.federated.carriers.messages import SiteOrder, SiteReply

Payload = bytes | memoryview
SiteAnswers = Callable[[SiteOrder, Payload], tuple[SiteReply, Payload]]
"""A site, as a carrier calls it."""


@dataclass(frozen=True)
class SentOrder:
    """An order on its way."""

    order: SiteOrder
    payload: Payload = b""


@dataclass(frozen=True)
class CarriedReply:
    """A reply, of which nothing is believed but that this site sent it."""

    site: str
    kind: str
    body: dict[str, Any]
    payload: Payload = b""


@dataclass(frozen=True)
class LostSite:
    """A carrier's report that a site will not answer its order."""

    site: str
    reason: str


class Carrier(Protocol):
    """The interface that carries orders to sites and replies back.

    A carrier keeps no round and judges nothing. It proves the site of a reply, hides payloads from other parties, and
    brings back sites that come again.
    """

    def present_sites(self) -> frozenset[str]:
        """The sites that can be asked now."""

    def broadcast_orders(self, orders: Mapping[str, SentOrder]) -> None:
        """Send each site its order; `collect_reply` reports one that cannot be reached."""

    def collect_reply(self, timeout_s: float) -> CarriedReply | LostSite | None:
        """Return the next reply of any site, or word that there will be none; None when neither is there in time."""

    def close(self) -> None:
        """End all processes and threads of the carrier."""
