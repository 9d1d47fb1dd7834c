"""The diagnosis of a stalled step: withheld messages are handed on; a silent party is replaced, not convicted."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.carried_frames import PartyLink
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import (
    Ask,
    Commit,
    Fetch,
    FetchBulk,
    FetchReply,
    MessageKey,
    PassedOnHeader,
    ProgressReport,
    Relay,
    ScreenHit,
    target_of,
)
from phalanx.pipeline.protocol.needs import (
    Delivery,
    MessageNeed,
    ProgressNeed,
    TensorsDelivery,
    TensorsNeed,
    owner_task,
)
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.verify.audits import directions_of
from phalanx.pipeline.verify.disputed_links import DisputedLinks
from phalanx.pipeline.verify.facts import AuditKey, StepFacts, StepLedger
from phalanx.pipeline.verify.step_waits import AuditOrder, MissingFacts, StepWaits, audit_mark, next_input
from phalanx.pipeline.verify.wait_tally import Waits
from phalanx.planner.schedules import Direction
from phalanx.security.crypto import digest_hex


@dataclass
class StallDiagnosis:
    """A diagnosis, when nothing has arrived for long, of the party that is to be replaced, if any.

    A message that its sender says it sent and its receiver says it lacks is a broken link or a lie of one
    of the two, and the owner cannot tell which. So the owner fetches all that is missing there, hands it on, and leads
    the link from then on (`DisputedLinks`). A sender that has nothing to show, a receiver that still lacks what the
    owner itself gave it, the liar on a link that is led, and a party that has all it needs and does nothing are
    replaced: silence is a failure and no proof of malice.

    Guarantees:
        Every call names a party, or hands on messages for the first time in this attempt, or finds that only the
        owner's own work is missing. So a step with silent parties ends. One party causes at most one silence on each of
        its links with workers in a session, and few on those with the owner, before it is named.
    """

    facts: StepFacts
    links: DisputedLinks
    _handed: set[tuple[object, ...]] = field(default_factory=set)
    _attempt: tuple[int, int] = (-1, -1)

    @owner_task
    async def find_silent_party(self, missing: MissingFacts) -> str | None:
        """Look for the silent party; None when there is none, or it is not yet clear which."""
        ledger, lagging = self.facts.ledger, self.facts.lagging_ledger
        self._begin_attempt()
        parties = sorted(self.facts.present_parties)
        standings = await ProgressNeed(parties, Ask(epoch=ledger.epoch, step=ledger.step))
        silent = [party for party in parties if party not in standings]
        if silent:
            return silent[0]
        if lagging is not None and any(auditor != OWNER for _, auditor in lagging.owed_audits):
            # a party that still audits the step before has made no update, so nothing else can be asked of it
            return await self._diagnose_audits(lagging, missing.unweighed_audits)
        if missing.states:
            return missing.states[0]
        if missing.screened:
            return await self._diagnose_urgent_audit(missing.screened[0])
        num_handed = len(self._handed)
        late = await self._diagnose_stages(standings)
        if late is None and len(self._handed) == num_handed:
            late = await self._diagnose_gradients(standings)
        if late is None and len(self._handed) == num_handed:
            # whoever was just given what it lacked is not late with what follows from that
            late = await self._diagnose_audits(ledger, missing.unweighed_audits)
        return late

    def _begin_attempt(self) -> None:
        attempt = (self.facts.ledger.step, self.facts.ledger.epoch)
        if self._attempt != attempt:
            self._attempt = attempt
            self._handed.clear()

    @owner_task
    async def find_waits(self, missing: MissingFacts) -> Waits:
        """Return what the step waits for at the moment, without acting on it."""
        self._begin_attempt()
        parties, ledger = sorted(self.facts.present_parties), self.facts.ledger
        standings = await ProgressNeed(parties, Ask(epoch=ledger.epoch, step=ledger.step))
        return StepWaits(self.facts, self.links, self._handed).list_waits(missing, standings)

    # --- commitments ------------------------------------------------------------------------------

    async def _diagnose_stages(self, standings: Mapping[str, ProgressReport]) -> str | None:
        """Look at each stage without a commitment: what it waits for, and whether that was sent."""
        for stage, party in sorted(self.facts.assignment.holders.items()):
            if stage in self.facts.ledger.commits:
                continue
            progress = standings[party].stages.get(str(stage))
            if progress is None:
                return None if party == OWNER else party
            place = next_input(self.facts.plan, stage, progress)
            if place is None:
                if party != OWNER:
                    return party
                continue
            source = stage + (-1 if place.direction == "forward" else 1)
            sender = self.facts.holder_of(source)
            upstream = standings[sender].stages.get(str(source))
            if upstream is not None and place in upstream.sent:
                key: MessageKey = (source, place.direction, place.microbatch)
                return await self._hand_on_messages((sender, party), key, standings)
        return None

    async def _hand_on_messages(
        self, link: PartyLink, key: MessageKey, standings: Mapping[str, ProgressReport]
    ) -> str | None:
        """Hand on all missing messages of a link; name the party that withholds, or denies what it was given."""
        sender, receiver = link
        if ("tensor", receiver, *key) in self._handed:
            return sender if receiver == OWNER else receiver
        links = self.links
        if links.are_of_workers(link):
            liar = links.liar_about_tensor(link, key)
            if liar is not None:
                return liar
            # the answers to this question come after the order was carried out
            standings = await self._lead_and_ask(link)
            silent = [party for party in link if party not in standings]
            if silent:
                return silent[0]
            links.note_received(link, links.received_messages(link, standings))
        elif OWNER in link and links.has_silenced_too_often(sender if receiver == OWNER else receiver):
            return sender if receiver == OWNER else receiver
        for missing in links.missing_messages(link, standings):
            mark = ("tensor", receiver, *missing)
            answer = None if mark in self._handed else await self._fetch_message(sender, missing, self.facts.ledger)
            if answer is not None:
                self._handed.add(mark)
                await self._relay_message(receiver, missing, answer[1], answer[2])
            elif mark not in self._handed:
                # what the owner says to itself has no header, and is never lost
                return None if sender == OWNER else sender
        return None

    async def _lead_and_ask(self, link: PartyLink) -> Mapping[str, ProgressReport]:
        ledger = self.facts.ledger
        await self.links.lead_link(link)
        return await ProgressNeed(link, Ask(epoch=ledger.epoch, step=ledger.step))

    async def _relay_message(
        self, receiver: str, key: MessageKey, evidence: PassedOnHeader, payload: memoryview
    ) -> None:
        ledger = self.facts.ledger
        relay = Relay.about_key(ledger.epoch, ledger.step, key, {"evidence": evidence})
        self._log_relayed(receiver, relay)
        await Delivery(receiver, relay, (payload,))

    # --- gradients and audits -------------------------------------------------------------------------

    async def _diagnose_gradients(self, standings: Mapping[str, ProgressReport]) -> str | None:
        facts, ledger = self.facts, self.facts.ledger
        shadowed = [(stage, name) for stage in facts.watched_stages for name in facts.assignment.shadows_of(stage)]
        for stage, auditor in shadowed:
            holder = facts.holder_of(stage)
            if (stage, auditor) in ledger.held:
                continue
            if facts.plan.guard.shadow_upkeep.in_lockstep and self._has_followed(stage, auditor):
                return auditor
            if not facts.plan.guard.sends_gradient or stage not in ledger.commits:
                continue
            mark = ("gradient", auditor, stage)
            if mark in self._handed or (stage in standings[auditor].gradients and auditor != OWNER):
                return holder if auditor == OWNER else auditor
            request = FetchBulk(epoch=ledger.epoch, step=ledger.step, stage=stage, purpose="gradient")
            expected = StageCopy.build_empty(facts.plan, stage).module.trainable_parameters()
            return await self._hand_transfer_on(
                (holder, auditor),
                request,
                expected,
                _announced_by(ledger.commits[stage]),
                mark,
            )
        return None

    def _has_followed(self, stage: int, auditor: str) -> bool:
        """Whether an auditor has reported on every microbatch of a stage: in lock-step it then has the gradient."""
        ledger = self.facts.ledger
        owing = {(of, party) for of, _, party in ledger.unreported_audits}
        return ledger.audits_drawn and auditor != OWNER and (stage, auditor) not in owing

    async def _hand_transfer_on(
        self,
        link: PartyLink,
        request: FetchBulk,
        expected: Mapping[str, Tensor],
        is_right: Callable[[dict[str, Tensor]], bool],
        mark: tuple[object, ...],
    ) -> str | None:
        """Hand a shadow its missing transfer from its holder; name the party that withholds or denies it."""
        holder, shadow = link
        if self.links.are_of_workers(link):
            size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
            liar = self.links.liar_about_transfer(link, request, size_bytes)
            if liar is not None:
                return liar
        elif self.links.has_silenced_too_often(holder if shadow == OWNER else shadow):
            return holder if shadow == OWNER else shadow
        answer = await TensorsNeed(holder, request, expected)
        if answer is None or not is_right(answer[0]):
            return holder
        self._handed.add(mark)
        self._log_relayed(shadow, request)
        await TensorsDelivery(shadow, request, answer[0], request.step)
        if self.links.are_of_workers(link) and not self.links.is_led(link):
            await self.links.lead_link(link)
        return None

    async def _diagnose_urgent_audit(self, hit: ScreenHit) -> str | None:
        """Have the receiver show the screened message, and a party its inputs."""
        receiver = self.facts.holder_of(target_of(hit.key))
        if await self._fetch_message(receiver, hit.key, self.facts.ledger) is None:
            return receiver
        audit = (hit.source, hit.microbatch, self.facts.shadow_of(hit.source))
        return await self._audit_inputs(self.facts.ledger, audit, directions_of(hit), "urgent")

    async def _diagnose_audits(self, ledger: StepLedger, said: Collection[tuple[int, AuditKey]]) -> str | None:
        """Name a party that owes an audit of this step although it has all that it takes."""
        for audit in (audit for audit in ledger.unreported_audits if (ledger.step, audit) not in said):
            stage, _, auditor = audit
            order: AuditOrder = "whole step" if (stage, auditor) in ledger.unfinished_step_audits else "drawn"
            silent = await self._audit_inputs(ledger, audit, ("forward", "backward"), order)
            if silent is not None:
                return silent
        owed = () if ledger.unreported_audits else ledger.unfinished_step_audits
        return next((auditor for _, auditor in owed if auditor != OWNER), None)

    async def _audit_inputs(
        self, ledger: StepLedger, audit: AuditKey, directions: Sequence[Direction], order: AuditOrder
    ) -> str | None:
        """Give an auditor its missing inputs; name one that has them and does not report.

        A microbatch may be audited for an odd message, because it was drawn, and once more with its whole step. An
        auditor keeps no inputs from one order to the next, so each order has them handed on anew.
        """
        facts, (stage, microbatch, auditor) = self.facts, audit
        holder = facts.holder_of(stage)
        mark = audit_mark(ledger, audit, order)
        if mark in self._handed:
            return None if auditor == OWNER else auditor
        self._handed.add(mark)
        keys: list[MessageKey] = [(stage + (-1 if way == "forward" else 1), way, microbatch) for way in directions]
        liars = [self._liar_about_input(key, auditor, ledger) for key in keys]
        if liars and None not in liars:
            return next((liar for liar in liars if liar != auditor), auditor)
        for key in keys:
            sender = facts.holder_of(key[0])
            answer = await self._fetch_message(sender, key, ledger) or await self._fetch_message(holder, key, ledger)
            if answer is None:
                return holder
            self._log_relayed(auditor, answer[0])
            await Delivery(auditor, answer[0], (answer[2],))
            for link in ((sender, auditor), (auditor, sender)):
                if self.links.are_of_workers(link) and not self.links.is_led(link):
                    await self.links.lead_link(link)
        return None

    def _liar_about_input(self, key: MessageKey, auditor: str, ledger: StepLedger) -> str | None:
        """The one of a sender and an auditor that keeps an input from the audit; None while that is not clear."""
        link = (self.facts.holder_of(key[0]), auditor)
        if not self.links.are_of_workers(link):
            # what the owner was asked for it has sent, and what a party has itself it need not be sent
            return auditor if link[0] == auditor else None
        return self.links.liar_about_answer(link, Fetch.from_key(ledger.epoch, ledger.step, key))

    async def _fetch_message(
        self, party: str, key: MessageKey, ledger: StepLedger
    ) -> tuple[FetchReply, PassedOnHeader, memoryview] | None:
        """A tensor under its sender's own header; whatever else is shown is nothing, and is not handed on."""
        request = Fetch.from_key(ledger.epoch, ledger.step, key)
        answer = await MessageNeed(party, request)
        message = None if answer is None else answer.message
        if answer is None or not isinstance(message, FetchReply) or message.evidence is None:
            return None
        statement = self.facts.find_tensor(message.evidence, request)
        is_right = statement is not None and statement.payload_digest == digest_hex(answer.payload)
        # an answer that claims another epoch would be laid aside by its receiver
        now = message.model_copy(update={"epoch": ledger.epoch})
        return (now, message.evidence, answer.payload) if is_right else None

    def _log_relayed(self, party: str, message: Message) -> None:
        body = message.model_dump(mode="json", include={"step", "stage", "microbatch", "direction", "source"})
        self.facts.observe("relayed", {"to": party, "what": message.kind, **body})


def _announced_by(commit: Commit) -> Callable[[dict[str, Tensor]], bool]:
    return lambda gradient: transfer_digest(gradient) == commit.gradient
