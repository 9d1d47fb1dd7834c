"""A carrier within one process: a site answers when its reply is collected."""

from collections import deque
from collections.abc import Mapping

from phalanx.federated.carriers.carrier import CarriedReply, LostSite, SentOrder, SiteAnswers


class MemoryCarrier:
    """Sites that are objects of this process.

    Args:
        sites: Sites by name; removing one from the dict means that it left, adding one that it came.
    """

    def __init__(self, sites: dict[str, SiteAnswers]) -> None:
        self.sites = sites
        self._sent: deque[tuple[str, SentOrder]] = deque()

    def present_sites(self) -> frozenset[str]:
        """As `Carrier` says."""
        return frozenset(self.sites)

    def broadcast_orders(self, orders: Mapping[str, SentOrder]) -> None:
        """As `Carrier` says."""
        self._sent.extend(orders.items())

    def collect_reply(self, timeout_s: float) -> CarriedReply | LostSite | None:
        """As `Carrier` says; nothing is ever waited for."""
        del timeout_s
        if not self._sent:
            return None
        name, sent = self._sent.popleft()
        if name not in self.sites:
            return LostSite(name, "gone")
        reply, payload = self.sites[name](sent.order, sent.payload)
        return CarriedReply(name, reply.kind, reply.model_dump(mode="json"), payload)

    def close(self) -> None:
        """Nothing was started."""
