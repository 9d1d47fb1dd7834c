"""The owner's decisions: which commitments are complete, which audits to draw, and when to apply a step."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from phalanx.optimizers import clip_coefficient
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.carried_frames import CarriedFrames, PartyLink
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.pipeline.protocol.needs import Delivery, owner_task
from phalanx.pipeline.verify.audit_judgement import compare_links
from phalanx.pipeline.verify.audits import Audits
from phalanx.pipeline.verify.disputed_links import DisputedLinks
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import Judgement, StepFacts, StepLedger
from phalanx.pipeline.verify.gradient_bounds import GradientBounds
from phalanx.pipeline.verify.record_claims import ClaimRecorder, FaultReports
from phalanx.pipeline.verify.referee import Referee
from phalanx.pipeline.verify.stall_diagnosis import StallDiagnosis
from phalanx.pipeline.verify.state_judgement import OwnerAudits, StateJudgement
from phalanx.pipeline.verify.step_waits import MissingFacts
from phalanx.pipeline.verify.wait_tally import Waits


class Coordinator:
    """The coordinator collects what parties commit to; `draw_conclusions` judges it.

    Attributes:
        facts: Assignment, commitments and agreed states.
        record_message: Records a message to the coordinator; False when it is not for it.
        ready: Parties that have taken their roles of this epoch.
        usage: Running costs by party, as each reported them last.
        busy: Seconds in which each party has worked since it was started, as each reported them last.
        bytes_sent: Bytes by party and receiver, as each reported them last.
    """

    def __init__(self, facts: StepFacts, draw: AuditDraw, carried: CarriedFrames) -> None:
        """`carried`: what went by way of the owner between workers."""
        self.facts = facts
        self._outgoing: list[Delivery] = []
        self._referee = Referee(facts.plan, facts.bits_decide, facts.noise_key)
        self._audits = Audits(facts, self._queue_delivery, self._referee, draw)
        bounds = GradientBounds(facts, self._referee)
        self._updates = StateJudgement(facts, self._referee, bounds)
        self._faults = FaultReports(facts)
        self._claims = ClaimRecorder(facts, self._audits, self._updates, self._faults)
        self.record_message = self._claims.record_message
        self.ready, self.usage, self.busy = self._claims.ready, self._claims.usage, self._claims.busy
        self.bytes_sent, self._convictions = self._claims.bytes_sent, self._claims.convictions
        self._phases = self._claims.phases
        self._owner_audits = OwnerAudits(facts, self._referee, bounds)
        self._draw = draw
        self._diagnosis = StallDiagnosis(facts, DisputedLinks(facts, carried))

    def take_party_phases(self) -> dict[str, dict[str, Any]]:
        """Return the claimed wall seconds of each worker that has reported since the last call, with their step."""
        taken = {party: {"step": step, "seconds": seconds} for party, (step, seconds) in self._phases.items()}
        self._phases.clear()
        return taken

    def _queue_delivery(self, party: str, message: Message, payload: Sequence[memoryview]) -> None:
        self._outgoing.append(Delivery(party, message, payload))

    def take_outgoing(self) -> list[Delivery]:
        """Hand out what judges have to say to parties: the loop sends it, and no judge waits on the stack for that."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    # --- what arrives -----------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether a message arrived or a conclusion was drawn since the last `draw_conclusions`."""
        return self._claims.has_news

    def look_again(self) -> None:
        """Let the next `draw_conclusions` judge all facts, even if no message arrives."""
        self._claims.has_news = True

    def add_ready_states(self, stage: int, states: Mapping[str, StateDigest | None]) -> None:
        """Take the states with which a stage's parties got ready as their reports on the last update."""
        self._claims.has_news = True
        for party, state in states.items():
            if state is not None:
                self._updates.reported_states.setdefault(stage, {})[party] = state

    # --- a step's life ------------------------------------------------------------------------------

    def open_epoch(self, epoch: int, step: int, assignment: Assignment) -> None:
        """Start again with a new assignment; agreed states stay."""
        self.facts.assignment = assignment
        self._referee.epoch = epoch
        self.ready.clear()
        self._reset_attempt(StepLedger(step, epoch, agreed=self.facts.agreed_states))

    def open_step(self, step: int) -> None:
        """Start the next step in the same epoch; states after the last update are still to be agreed on."""
        facts = self.facts
        facts.previous, facts.updated_by = facts.ledger, facts.assignment
        facts.copied.clear()
        self._reset_attempt(StepLedger(step, facts.ledger.epoch))

    def _reset_attempt(self, ledger: StepLedger) -> None:
        self.facts.ledger = ledger
        # what was not answered before says nothing about this attempt
        self.facts.unanswered.clear()
        self._updates.forget_reports()
        self._audits.reset_attempt()
        # what a party has signed convicts it in the next attempt as well
        present = self.facts.present_parties
        self._convictions[:] = [conviction for conviction in self._convictions if conviction.verdict.party in present]
        self._claims.has_news = True

    @owner_task
    async def draw_conclusions(self) -> Judgement | None:
        """Draw what conclusions can be drawn now; the first guilty party ends it."""
        if not (self._claims.has_news or self.facts.proved):
            return None
        self._claims.has_news, before = False, self._conclusion_counts()
        judgement = await self._judge_facts()
        for delivery in self.take_outgoing():
            await delivery
        # one conclusion may be what another one waits for
        self._claims.has_news = self._claims.has_news or judgement is not None or self._conclusion_counts() != before
        return judgement

    def _conclusion_counts(self) -> tuple[int, ...]:
        """Changes with every conclusion that was drawn."""
        ledger = self.facts.ledger
        agreed = (len(self.facts.agreed_states), len(ledger.gradients_agreed))
        asked = (ledger.num_audits, len(ledger.owners_audits), ledger.audits_drawn)
        late = [
            number for ledger in self.facts.open_ledgers for number in (len(ledger.reports), len(ledger.steps_agreed))
        ]
        return (*agreed, *asked, *late, len(self._audits.screened))

    def weigh_proofs(self) -> Judgement | None:
        """Return a judgement that a party's own signatures prove, whatever the state of the step is."""
        facts = self.facts
        while facts.proved:
            proved = facts.proved.pop(0)
            if proved.verdict.party in facts.present_parties:
                return proved
        return self._convictions.pop(0) if self._convictions else self._faults.weigh_faults()

    @owner_task
    async def _judge_facts(self) -> Judgement | None:
        facts, judgement = self.facts, self.weigh_proofs()
        if judgement is not None or not facts.plan.guard.is_enabled:
            return judgement
        judgement = (
            await self._updates.weigh_states()
            or await self._audits.weigh_reports()
            or await self._updates.weigh_gradients()
            or await self._updates.weigh_step_audits()
            or await self._audit_as_owner()
        )
        if judgement is not None:
            return judgement
        all_committed = len(self.facts.ledger.commits) == len(facts.assignment.holders)
        if (
            all_committed
            and not self.facts.ledger.audits_drawn
            and facts.agreed_states.keys() >= set(facts.watched_stages)
        ):
            judgement = compare_links(facts)
            if judgement is None:
                self._audits.draw_audits()
        return judgement

    def take_proved(self, alive: Collection[str]) -> list[Judgement]:
        """Hand out the remaining judgements, one for each party, and forget pending confirmations."""
        proved = {judgement.verdict.party: judgement for judgement in reversed(self.facts.proved)}
        self.facts.proved.clear()
        self._owner_audits.forget_redone()
        return [judgement for party, judgement in proved.items() if party in alive]

    def forget_audits(self) -> None:
        """Forget the owner's own audits: they lead to no update, as the batch is given up."""
        self._owner_audits.forget_redone()

    def is_decided(self, *, may_lag: bool) -> bool:
        """Whether the optimizers may take the step: its own audits may lag, the previous step's may not.

        Args:
            may_lag: Whether the step could be undone and nothing speaks against doing so.
        """
        facts, ledger = self.facts, self.facts.ledger
        if len(ledger.commits) < len(facts.assignment.holders):
            return False
        if not facts.plan.guard.is_enabled:
            return True
        watched = set(facts.watched_stages)
        return (
            ledger.audits_drawn
            and not self._audits.screened
            and ledger.gradients_agreed >= watched
            and watched <= facts.agreed_states.keys()
            and facts.lagging_ledger is None
            and (ledger.is_audited or (may_lag and ledger.may_lag))
        )

    def order_owner_audits(self) -> bool:
        """Order the owner's audit of every stage, because loss or norm are not finite, or a spike.

        Returns:
            Whether an audit is still to be done; False once the owner has redone each stage in this attempt.
        """
        facts, ledger = self.facts, self.facts.ledger
        if not facts.plan.guard.is_enabled:
            return False
        ledger.owners_audits |= set(facts.watched_stages) - ledger.owner_audited
        self._claims.has_news = True
        return bool(ledger.owners_audits)

    @property
    def progress_counts(self) -> tuple[int, ...]:
        """Changes with whatever brings the step nearer to its end; repetition and idle talk change nothing."""
        ledger, facts = self.facts.ledger, self.facts
        num_reported_states = sum(len(states) for states in self._updates.reported_states.values())
        done = (len(ledger.commits), len(ledger.held), len(facts.agreed_states), num_reported_states, len(self.ready))
        return (*done, *self._audits.progress_counts)

    @owner_task
    async def find_silent(self) -> str | None:
        """After a long silence, hand on stuck messages and name the party to replace, if any."""
        return await self._diagnosis.find_silent_party(self._missing_facts())

    @owner_task
    async def find_waits(self) -> Waits:
        """Return what the step waits for at the moment."""
        return await self._diagnosis.find_waits(self._missing_facts())

    def draw_moment(self, number: int) -> float:
        """A share from 0 to 1 that no worker can foresee, for the numbered look at an attempt."""
        return self._draw.draw_moment(step=self.facts.ledger.step, epoch=self.facts.ledger.epoch, number=number)

    @owner_task
    async def lead_links(self, links: Collection[PartyLink]) -> list[PartyLink]:
        """Route links through the owner; return the links that were not routed so before."""
        disputes = self._diagnosis.links
        fresh = [link for link in links if not disputes.is_led(link)]
        for link in fresh:
            await disputes.lead_link(link)
        return fresh

    def _missing_facts(self) -> MissingFacts:
        facts = self.facts
        late = [
            party
            for stage in facts.watched_stages
            for party in facts.assignment.parties_of(stage)
            if stage not in facts.agreed_states
            and party != OWNER
            and party not in self._updates.reported_states.get(stage, {})
        ]
        audits = self._audits
        return MissingFacts(late, list(audits.screened.values()), audits.unweighed_audits)

    def describe_missing(self) -> str:
        """Describe what is still missing, for a message to the user."""
        facts, ledger = self.facts, self.facts.ledger
        watched, lagging = set(facts.watched_stages), facts.lagging_ledger
        missing = {
            "audits of the last step (stage, auditor)": [] if lagging is None else lagging.owed_audits,
            "commitments of stages": sorted(facts.assignment.holders.keys() - ledger.commits.keys()),
            "audits (stage, microbatch, auditor)": ledger.unreported_audits,
            "gradients of stages": sorted(watched - ledger.gradients_agreed),
            "audits of whole steps (stage, auditor)": sorted(ledger.awaited_step_audits - ledger.steps_agreed),
            "states of stages": sorted(watched - facts.agreed_states.keys()),
            "screened (stage, microbatch)": sorted(self._audits.screened),
        }
        return ", ".join(f"{what} {which}" for what, which in missing.items() if which) or "nothing"

    def compute_clip(self) -> float:
        """Clip coefficient of the step, from norms that the shadows have confirmed."""
        ledger, plan = self.facts.ledger, self.facts.plan
        ledger.clip_coefficient = clip_coefficient(ledger.total_norm(), plan.optimizer.clip_norm)
        return ledger.clip_coefficient

    # --- audits -------------------------------------------------------------------------------------------

    async def _audit_as_owner(self) -> Judgement | None:
        """Judge updates by the owner's earlier audits; once all auditors have reported, run the audits that are due."""
        facts, ledger = self.facts, self.facts.ledger
        facts.proved += self._owner_audits.weigh_states()
        if facts.proved:
            return facts.proved.pop(0)
        if not ledger.audits_drawn or ledger.unreported_audits:
            return None
        for stage in sorted(ledger.owners_audits):
            ledger.num_audits += facts.plan.microbatches
            ledger.owners_audits.remove(stage)
            ledger.owner_audited.add(stage)
            judgements = await self._owner_audits.audit_stage(stage)
            facts.proved += judgements
            if facts.proved:
                return facts.proved.pop(0)
        return None
