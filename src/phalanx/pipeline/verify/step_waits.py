"""The waits of a step: what is missing at one moment, and which parties and links owe it."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.carried_frames import PartyLink
from phalanx.pipeline.protocol.messages import MessageKey, Place, Progress, ProgressReport, ScreenHit
from phalanx.pipeline.verify.disputed_links import DisputedLinks
from phalanx.pipeline.verify.facts import AuditKey, StepFacts, StepLedger
from phalanx.pipeline.verify.wait_tally import Waits
from phalanx.planner.schedules import Direction, stage_actions

AuditOrder = Literal["urgent", "drawn", "whole step"]


@dataclass(frozen=True)
class MissingFacts:
    """The things that the coordinator still waits for, beside those in the ledgers.

    Attributes:
        states: Parties that have not reported a state after an update.
        screened: Messages that their receivers do not use before an audit has cleared them.
        said: Audits, by step, that were reported on and are not weighed yet.
    """

    states: Sequence[str]
    screened: Sequence[ScreenHit]
    unweighed_audits: Collection[tuple[int, AuditKey]] = ()


def next_input(plan: StepPlan, stage: int, progress: Progress) -> Place | None:
    """The input that keeps a stage from its next action; None when it has all it needs."""
    last = len(plan.stages) - 1
    if last == 0:
        # one stage is first and last at once: nobody sends it anything
        return None
    needless: Direction | None = "forward" if stage == 0 else "backward" if stage == last else None
    for action in stage_actions(plan.schedule, stage, last + 1, plan.microbatches):
        place = Place(direction=action.direction, microbatch=action.microbatch)
        if action.direction == needless or (needless is None and place in progress.sent):
            continue
        if place not in progress.received:
            return place
        if needless is None:
            return None
    return None


def audit_mark(ledger: StepLedger, audit: AuditKey, order: AuditOrder) -> tuple[object, ...]:
    """The mark of inputs that an auditor was handed for one order."""
    stage, microbatch, auditor = audit
    return ("audit", order, auditor, ledger.step, stage, microbatch)


@dataclass(frozen=True)
class StepWaits:
    """What a step waits for by what parties report; nothing is done about it.

    Attributes:
        links: Know which end of a link is to blame.
        handed: Marks of the messages that the owner has handed on in this attempt.
    """

    facts: StepFacts
    links: DisputedLinks
    handed: Collection[tuple[object, ...]]

    def list_waits(self, missing: MissingFacts, standings: Mapping[str, ProgressReport]) -> Waits:
        """Return the parties and links that the step waits for."""
        facts, ledger, lagging = self.facts, self.facts.ledger, self.facts.lagging_ledger
        silent = [party for party in sorted(facts.present_parties) if party not in standings]
        if silent or missing.states:
            return Waits(silent or missing.states)
        if lagging is not None and any(auditor != OWNER for _, auditor in lagging.owed_audits):
            return self._audit_waits(lagging, missing.unweighed_audits)
        if len(ledger.commits) < len(facts.assignment.holders):
            return self._stage_waits(standings)
        audits = self._audit_waits(ledger, missing.unweighed_audits)
        arrived = {(stage, party) for party, report in standings.items() for stage in report.gradients}
        unheld = [
            (stage, shadow)
            for stage in facts.watched_stages
            for shadow in facts.assignment.shadows_of(stage)
            if (stage, shadow) not in ledger.held and facts.plan.guard.sends_gradient
        ]
        gradients = self._gradient_waits(unheld, arrived)
        return Waits([*audits.parties, *gradients.parties], [*audits.links, *gradients.links])

    def _gradient_waits(self, unheld: Iterable[tuple[int, str]], arrived: Collection[tuple[int, str]]) -> Waits:
        """Shadows that have what they wait for, by their own word or from the owner; and the links of the others."""
        parties, links = list[str](), list[PartyLink]()
        for stage, shadow in unheld:
            holder = self.facts.holder_of(stage)
            if shadow != OWNER and ((stage, shadow) in arrived or ("gradient", shadow, stage) in self.handed):
                parties.append(shadow)
            elif self.links.are_of_workers((holder, shadow)):
                links.append((holder, shadow))
            else:
                parties.append(holder if shadow == OWNER else shadow)
        return Waits(parties, links)

    def _audit_waits(self, ledger: StepLedger, said: Collection[tuple[int, AuditKey]]) -> Waits:
        """Auditors that were handed all they need, and the links on which the others get it."""
        parties, links = set[str](), set[PartyLink]()
        for audit in (audit for audit in ledger.unreported_audits if (ledger.step, audit) not in said):
            stage, _, auditor = audit
            order: AuditOrder = "whole step" if (stage, auditor) in ledger.unfinished_step_audits else "drawn"
            senders = {self.facts.holder_of(stage - 1), self.facts.holder_of(stage + 1)} - {OWNER, auditor}
            if auditor == OWNER or not senders or audit_mark(ledger, audit, order) in self.handed:
                parties.add(auditor)
            else:
                links |= {(sender, auditor) for sender in senders}
        if not ledger.unreported_audits:
            parties |= {auditor for _, auditor in ledger.unfinished_step_audits}
        return Waits(parties, links)

    def _stage_waits(self, standings: Mapping[str, ProgressReport]) -> Waits:
        """The stages that have all they need and do nothing, and the links with a tensor under way."""
        parties, links = set[str](), set[PartyLink]()
        for stage, party in self.facts.assignment.holders.items():
            progress = standings[party].stages.get(str(stage))
            if stage in self.facts.ledger.commits:
                continue
            place = None if progress is None else next_input(self.facts.plan, stage, progress)
            if place is None:
                parties.add(party)
                continue
            source = stage + (-1 if place.direction == "forward" else 1)
            link = (self.facts.holder_of(source), party)
            key: MessageKey = (source, place.direction, place.microbatch)
            if key in self.links.missing_messages(link, standings):
                blame = self.links.blame_ends(link, self.links.liar_about_tensor(link, key))
                parties.update(blame.parties)
                links.update(blame.links)
        return Waits(parties, links)
