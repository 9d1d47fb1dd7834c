"""The owner's view of the sites: each has one open ticket at most, and a late answer does not count."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from phalanx.errors import TransportError
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import CarriedReply, Carrier, LostSite, Payload, SentOrder
from phalanx.transport import parse_body

Clock = Callable[[], float]
MakeOrder = Callable[[int], SentOrder]
"""Makes an order with a ticket."""


@dataclass(frozen=True)
class SiteAnswer:
    """A site's answer to its open ticket; its contents are a claim.

    Attributes:
        reply: Parsed reply; None where there will be none.
        fault: Why there is none, or why it is of no use; empty where it is.
        culprit: The site that it blames for a fault; empty where it blames none.
        seconds: Time from the order to the answer, by the owner's clock.
    """

    site: str
    reply: m.SiteReply | None
    payload: Payload = b""
    fault: str = ""
    culprit: str = ""
    seconds: float = 0.0


class Fleet:
    """The sites of a run.

    Attributes:
        late: Replies that came when their ticket was not waited for any more, by site.

    Guarantees:
        `answers` gives one answer at most for each ticket: a second reply, one to another ticket and one of another
        kind than was asked for are counted in `late` or told as faults, and change nothing.
    """

    def __init__(self, carrier: Carrier, clock: Clock = time.monotonic) -> None:
        self._carrier, self._clock = carrier, clock
        self._last_ticket = 0
        self._open: dict[str, int] = {}
        self._due: dict[str, type[m.SiteReply]] = {}
        self._given_up: dict[str, int] = {}
        self._asked_at: dict[str, float] = {}
        self.bytes_out: Counter[str] = Counter()
        self.bytes_in: Counter[str] = Counter()
        self.late: Counter[str] = Counter()

    def idle_sites(self) -> frozenset[str]:
        """The sites that are there and have answered all that they were asked."""
        return frozenset(self._carrier.present_sites() - self._open.keys() - self._given_up.keys())

    def ask_sites(self, orders: Mapping[str, MakeOrder], due: type[m.SiteReply]) -> None:
        """Give each of some idle sites an order, which is to be answered by a reply of this kind."""
        sent: dict[str, SentOrder] = {}
        for site, make in orders.items():
            self._last_ticket += 1
            self._open[site], self._due[site] = self._last_ticket, due
            self._asked_at[site] = self._clock()
            sent[site] = make(self._last_ticket)
            self.bytes_out[site] += memoryview(sent[site].payload).nbytes
        self._carrier.broadcast_orders(sent)

    def waited_for(self) -> frozenset[str]:
        """The sites with an open ticket."""
        return frozenset(self._open)

    def yield_answers(self, deadline_s: float, among: frozenset[str] | None = None) -> Iterator[SiteAnswer]:
        """Yield answers as they come, until none of these sites is waited for, or the deadline is over.

        Args:
            deadline_s: Seconds from now on, for all answers.
        """
        until = self._clock() + deadline_s
        while self._open.keys() & (self._open.keys() if among is None else among):
            left_s = until - self._clock()
            reply = self._carrier.collect_reply(left_s) if left_s > 0 else None
            if reply is None:
                return
            answer = self._lost_answer(reply) if isinstance(reply, LostSite) else self._parse_answer(reply)
            if answer is not None:
                yield answer

    def give_up(self, sites: frozenset[str]) -> None:
        """Wait no more for these; until its late reply has come, or it has begun anew, a site is asked nothing."""
        for site in sites & self._open.keys():
            self._given_up[site] = self._open.pop(site)

    def end_sites(self) -> None:
        """Tell all that the run is over."""
        orders = {site: SentOrder(m.EndOrder(ticket=0)) for site in self._carrier.present_sites()}
        self._carrier.broadcast_orders(orders)

    def _lost_answer(self, lost: LostSite) -> SiteAnswer | None:
        # what it was asked is gone with it; a process that comes back begins without a ticket
        self._given_up.pop(lost.site, None)
        if self._open.pop(lost.site, None) is None:
            return None
        return SiteAnswer(lost.site, None, fault=lost.reason)

    def _parse_answer(self, carried: CarriedReply) -> SiteAnswer | None:
        self.bytes_in[carried.site] += memoryview(carried.payload).nbytes
        try:
            reply = parse_body(m.REPLIES, carried.kind, carried.body)
        except TransportError:
            is_open = self._open.pop(carried.site, None) is not None
            return SiteAnswer(carried.site, None, fault="malformed") if is_open else None
        if self._given_up.get(carried.site) == reply.ticket:
            del self._given_up[carried.site]
        if self._open.get(carried.site) != reply.ticket:
            self.late[carried.site] += 1
            return None
        del self._open[carried.site]
        if isinstance(reply, m.SiteFault):
            return SiteAnswer(carried.site, None, fault=reply.reason, culprit=reply.culprit)
        if not isinstance(reply, self._due[carried.site]):
            return SiteAnswer(carried.site, None, fault="malformed")
        return SiteAnswer(carried.site, reply, carried.payload, seconds=self._clock() - self._asked_at[carried.site])
