"""Disputed links: one end reports a message sent that the other reports missing; the owner then leads the link."""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.carried_frames import CarriedFrames, PartyLink
from phalanx.pipeline.protocol.messages import Bulk, Detour, Fetch, FetchBulk, MessageKey, ProgressReport
from phalanx.pipeline.protocol.needs import Delivery
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.verify.wait_tally import Waits

MAX_SILENCES = 3
"""Silences that a party may cause on its link with the owner in `WINDOW_STEPS` steps before it is replaced."""

WINDOW_STEPS = 10


class DisputedLinks:
    """The links on which the owner has found a missing message, and its observations since.

    Of two workers that contradict each other the owner cannot tell which one lies, and neither is blamed. From then on
    their link goes by way of the owner, for the rest of the session. The owner then lacks a withheld message itself,
    and has delivered a denied one itself: the second dispute has a culprit.

    Guarantees:
        A sender that hands each tensor to its link before it reports it as sent, and a receiver that reports each
        tensor that reached it, are never blamed for acts of the other end of a link between workers.
    """

    def __init__(self, facts: StepFacts, carried: CarriedFrames) -> None:
        self._facts = facts
        self._carried = carried
        self._led: dict[PartyLink, tuple[tuple[int, int], frozenset[MessageKey]]] = {}
        self._silences: dict[str, deque[int]] = {}

    @staticmethod
    def are_of_workers(link: PartyLink) -> bool:
        """Whether a link is between two workers; on its own links the owner knows what was sent."""
        return OWNER not in link and link[0] != link[1]

    def is_led(self, link: PartyLink) -> bool:
        """Whether a link goes by way of the owner."""
        return link in self._led

    async def lead_link(self, link: PartyLink) -> None:
        """Let a sender send by way of the owner."""
        sender, receiver = link
        ledger = self._facts.ledger
        self._led[link] = (self._present_attempt, frozenset())
        self._facts.observe("link_led", {"party": sender, "to": receiver, "step": ledger.step})
        await Delivery(sender, Detour(epoch=ledger.epoch, receiver=receiver), ())

    def note_received(self, link: PartyLink, keys: Collection[MessageKey]) -> None:
        """Note the receiver's reported messages, once the sender is known to have left the link itself."""
        self._led[link] = (self._present_attempt, frozenset(keys))

    def blame_ends(self, link: PartyLink, liar: str | None) -> Waits:
        """Blame a party for the missing messages of a link; both ends where the liar is unknown."""
        if self.are_of_workers(link):
            return Waits(links=(link,)) if liar is None else Waits(parties=(liar,))
        return Waits(parties=(link[0] if link[1] == OWNER else link[1],))

    def liar_about_tensor(self, link: PartyLink, key: MessageKey) -> str | None:
        """The end that withholds or denies a tensor; None while the link is not led."""
        if link not in self._led:
            return None
        ledger = self._facts.ledger
        attempt, received = self._led[link]
        is_there = self._carried.has_tensor(link, ledger.epoch, ledger.step, key)
        return link[1] if is_there or (attempt == self._present_attempt and key in received) else link[0]

    def liar_about_transfer(self, link: PartyLink, request: FetchBulk, size_bytes: int) -> str | None:
        """The end that withholds or denies a transfer; None unless the link was led before this attempt began."""
        if link not in self._led or self._led[link][0] == self._present_attempt:
            return None
        place = request.model_dump(include={"epoch", "step", "stage", "purpose"})
        transfer = Bulk.model_validate({**place, "offset": 0, "total": size_bytes})
        return link[1] if self._carried.has_transfer(link, transfer) else link[0]

    def liar_about_answer(self, link: PartyLink, request: Fetch) -> str | None:
        """The end that withholds, denies or never asked for an input of an audit; None unless both ways were led."""
        sender, auditor = link
        if any(
            self._led.get(way, (self._present_attempt,))[0] == self._present_attempt
            for way in (link, (auditor, sender))
        ):
            return None
        if not self._carried.has_request((auditor, sender), request):
            return auditor
        for answer, digest in self._carried.find_answers(link, request):
            statement = self._facts.find_tensor(answer.evidence, request)
            if statement is not None and statement.payload_digest == digest:
                return auditor
        return sender

    def has_silenced_too_often(self, party: str) -> bool:
        """Count a silence on a party's link with the owner, and say whether it is one too many."""
        step = self._facts.ledger.step
        steps = self._silences.setdefault(party, deque(maxlen=MAX_SILENCES + 1))
        steps.append(step)
        return len(steps) > MAX_SILENCES and steps[0] > step - WINDOW_STEPS

    def missing_messages(self, link: PartyLink, standings: Mapping[str, ProgressReport]) -> list[MessageKey]:
        """The tensors of this step that a sender says it sent to a receiver that says it lacks them."""
        sent, received = self._reported_messages(link, standings)
        return sorted(sent - received)

    def received_messages(self, link: PartyLink, standings: Mapping[str, ProgressReport]) -> set[MessageKey]:
        """The tensors of this step that the receiver says it has got over the link."""
        return self._reported_messages(link, standings)[1]

    def _reported_messages(
        self, link: PartyLink, standings: Mapping[str, ProgressReport]
    ) -> tuple[set[MessageKey], set[MessageKey]]:
        sent, received = set[MessageKey](), set[MessageKey]()
        for source, target in self._adjacent_stages(link):
            direction = "forward" if target > source else "backward"
            for party, stage, places in ((link[0], source, sent), (link[1], target, received)):
                report = standings.get(party)
                progress = None if report is None else report.stages.get(str(stage))
                if progress is not None:
                    reported = progress.sent if party == link[0] and stage == source else progress.received
                    places |= {(source, p.direction, p.microbatch) for p in reported if p.direction == direction}
        return sent, received

    def _adjacent_stages(self, link: PartyLink) -> Sequence[tuple[int, int]]:
        holders = self._facts.assignment.holders
        return [
            (source, target)
            for source in holders
            for target in (source - 1, source + 1)
            if (holders[source], holders.get(target)) == link
        ]

    @property
    def _present_attempt(self) -> tuple[int, int]:
        return self._facts.ledger.step, self._facts.ledger.epoch
