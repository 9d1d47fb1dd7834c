"""The owner's walk through the phases of one sum: the message to each site, and the sites left after a phase."""

from collections.abc import Callable, Mapping

from phalanx.errors import AggregationError
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import Payload, SentOrder
from phalanx.federated.rounds.fleet import Fleet
from phalanx.federated.rounds.journal import RoundRecord

Exclude = Callable[[str, str], None]
"""Shuts a site out, with the reason."""
Take = Callable[[str, m.SumReply, bytes], object]
"""Takes the reply of a site, and its payload; raises where it is refused."""


class SumWalk:
    """A walk through the phases of one sum; a site that is silent or sends a refused message is out of the rest of it.

    Attributes:
        accusers: The sites that refused to go on for what another one had signed, by the name of that one.
    """

    def __init__(self, fleet: Fleet, record: RoundRecord, place: tuple[str, int], deadline_s: float) -> None:
        self._fleet, self._record, self._deadline_s = fleet, record, deadline_s
        self._model, self._number = place
        self.accusers: dict[str, set[str]] = {}

    def run_phase(self, name: m.SumPhaseName, messages: Mapping[str, bytes], take: Take) -> tuple[str, ...]:
        """Send each site its message, and give the answers to the server; return the sites that are left."""
        answering: list[str] = []
        sites = frozenset(messages)

        def order(site: str, ticket: int) -> SentOrder:
            order = m.SumOrder(
                ticket=ticket, round=self._record.number, model=self._model, number=self._number, phase=name
            )
            return SentOrder(order, messages[site])

        self._fleet.ask_sites({site: _bind_order(order, site) for site in sorted(sites)}, m.SumReply)
        for answer in self._fleet.yield_answers(self._deadline_s, sites):
            if not isinstance(answer.reply, m.SumReply):
                self._record.left_out[answer.site] = answer.fault
                if answer.culprit:
                    self.accusers.setdefault(answer.culprit, set()).add(answer.site)
                continue
            try:
                take(answer.site, answer.reply, _payload_bytes(answer.payload))
            except (AggregationError, ValueError):
                self._record.left_out[answer.site] = "refused"
                continue
            answering.append(answer.site)
        for site in sites & self._fleet.waited_for():
            self._record.left_out[site] = "late"
        self._fleet.give_up(sites)
        return tuple(sorted(answering))


def _bind_order(order: Callable[[str, int], SentOrder], site: str) -> Callable[[int], SentOrder]:
    return lambda ticket: order(site, ticket)


def _payload_bytes(payload: Payload) -> bytes:
    return payload if isinstance(payload, bytes) else bytes(payload)
