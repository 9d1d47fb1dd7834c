"""The owner's decisions: which commitments are complete, which audits to draw, and when to apply a step."""

from collections.abc import Collection, Mapping, Sequence

from phalanx.optimizers import clip_coefficient
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.carried_frames import CarriedFrames, PartyLink
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import StateDigest
from phalanx.pipeline.protocol.needs import Delivery, task
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
    """The coordinator collects what parties commit to; `advance` says what follows from it.

    Attributes:
        facts: Assignment, commitments and agreed states.
        handle: Records a message to the coordinator; False when it is not for it.
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
        self._audits = Audits(facts, self._say, self._referee, draw)
        bounds = GradientBounds(facts, self._referee)
        self._updates = StateJudgement(facts, self._referee, bounds)
        self._faults = FaultReports(facts)
        self._claims = ClaimRecorder(facts, self._audits, self._updates, self._faults)
        self.handle = self._claims.handle
        self.ready, self.usage, self.busy = self._claims.ready, self._claims.usage, self._claims.busy
        self.bytes_sent, self._convictions = self._claims.bytes_sent, self._claims.convictions
        self._owner_audits = OwnerAudits(facts, self._referee, bounds)
        self._draw = draw
        self._diagnosis = StallDiagnosis(facts, DisputedLinks(facts, carried))

    @property
    def ledger(self) -> StepLedger:
        """Of the present attempt at the present step."""
        return self.facts.ledger

    def _say(self, party: str, message: Message, payload: Sequence[memoryview]) -> None:
        self._outgoing.append(Delivery(party, message, payload))

    def take_outgoing(self) -> list[Delivery]:
        """Hand out what judges have to say to parties: the loop sends it, and no judge waits on the stack for that."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    # --- what arrives -----------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `advance` may find something: something has come, or was concluded, since it looked."""
        return self._claims.has_news

    def look_again(self) -> None:
        """Let the next `advance` look at everything, whether anything has come or not."""
        self._claims.has_news = True

    def said_ready(self, stage: int, states: Mapping[str, StateDigest | None]) -> None:
        """Take the states with which holder and shadow got ready as their reports on the last update."""
        self._claims.has_news = True
        for party, state in states.items():
            if state is not None:
                self._updates.said.setdefault(stage, {})[party] = state

    # --- a step's life ------------------------------------------------------------------------------

    def open_epoch(self, epoch: int, step: int, assignment: Assignment) -> None:
        """Start again with a new assignment; agreed states stay."""
        self.facts.assignment = assignment
        self._referee.epoch = epoch
        self.ready.clear()
        self._reset(StepLedger(step, epoch, agreed=self.facts.agreed))

    def open_step(self, step: int) -> None:
        """Start the next step in the same epoch; states after the last update are still to be agreed on."""
        facts = self.facts
        facts.previous, facts.updated_by = facts.ledger, facts.assignment
        facts.copied.clear()
        self._reset(StepLedger(step, facts.ledger.epoch))

    def _reset(self, ledger: StepLedger) -> None:
        self.facts.ledger = ledger
        # what was not answered before says nothing about this attempt
        self.facts.unanswered.clear()
        self._updates.forget()
        self._audits.reset()
        # what a party has signed convicts it in the next attempt as well
        present = self.facts.present
        self._convictions[:] = [conviction for conviction in self._convictions if conviction.verdict.party in present]
        self._claims.has_news = True

    @task
    async def advance(self) -> Judgement | None:
        """Draw what conclusions can be drawn now; the first guilty party ends it."""
        if not (self._claims.has_news or self.facts.proved):
            return None
        self._claims.has_news, before = False, self._conclusions()
        judgement = await self._conclude()
        for delivery in self.take_outgoing():
            await delivery
        # one conclusion may be what another one waits for
        self._claims.has_news = self._claims.has_news or judgement is not None or self._conclusions() != before
        return judgement

    def _conclusions(self) -> tuple[int, ...]:
        """Changes with every conclusion that was drawn."""
        ledger = self.ledger
        agreed = (len(self.facts.agreed), len(ledger.gradients_agreed))
        asked = (ledger.num_audits, len(ledger.owners_audits), ledger.audits_drawn)
        late = [
            number for ledger in self.facts.open_ledgers for number in (len(ledger.reports), len(ledger.steps_agreed))
        ]
        return (*agreed, *asked, *late, len(self._audits.screened))

    @task
    async def _conclude(self) -> Judgement | None:
        facts = self.facts
        while facts.proved:
            proved = facts.proved.pop(0)
            if proved.verdict.party in facts.present:
                return proved
        judgement = self._convictions.pop(0) if self._convictions else self._faults.weigh()
        if judgement is not None or not facts.plan.guard.enabled:
            return judgement
        judgement = (
            await self._updates.weigh_states()
            or await self._audits.weigh()
            or await self._updates.weigh_gradients()
            or await self._updates.weigh_step_audits()
            or await self._audit_as_owner()
        )
        if judgement is not None:
            return judgement
        all_committed = len(self.ledger.commits) == len(facts.assignment.holders)
        if all_committed and not self.ledger.audits_drawn and facts.agreed.keys() >= set(facts.watched):
            judgement = compare_links(facts)
            if judgement is None:
                self._audits.draw()
        return judgement

    def take_proved(self, alive: Collection[str]) -> list[Judgement]:
        """Hand out the remaining judgements, one for each party, and forget pending confirmations."""
        proved = {judgement.verdict.party: judgement for judgement in reversed(self.facts.proved)}
        self.facts.proved.clear()
        self._owner_audits.forget()
        return [judgement for party, judgement in proved.items() if party in alive]

    def forget_audits(self) -> None:
        """Forget the owner's own audits: they lead to no update, as the batch is given up."""
        self._owner_audits.forget()

    def decided(self, *, may_lag: bool) -> bool:
        """Whether the optimizers may take the step: its own audits may lag, the previous step's may not.

        Args:
            may_lag: Whether the step could be undone and nothing speaks against doing so.
        """
        facts, ledger = self.facts, self.ledger
        if len(ledger.commits) < len(facts.assignment.holders):
            return False
        if not facts.plan.guard.enabled:
            return True
        watched = set(facts.watched)
        return (
            ledger.audits_drawn
            and not self._audits.screened
            and ledger.gradients_agreed >= watched
            and watched <= facts.agreed.keys()
            and facts.lagging is None
            and (ledger.is_audited or (may_lag and ledger.may_lag))
        )

    def doubt_step(self) -> bool:
        """The outcome is not a number: the owner is to redo every stage once.

        Returns:
            Whether there is anything that it has not redone yet.
        """
        facts, ledger = self.facts, self.ledger
        if not facts.plan.guard.enabled:
            return False
        ledger.owners_audits |= set(facts.watched) - ledger.owner_audited
        self._claims.has_news = True
        return bool(ledger.owners_audits)

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes with whatever brings the step nearer to its end; repetition and idle talk change nothing."""
        ledger, facts = self.ledger, self.facts
        num_reported_states = sum(len(states) for states in self._updates.said.values())
        done = (len(ledger.commits), len(ledger.held), len(facts.agreed), num_reported_states, len(self.ready))
        return (*done, *self._audits.progress)

    @task
    async def find_silent(self) -> str | None:
        """After a long silence, hand on stuck messages and name the party to replace, if any."""
        return await self._diagnosis.find(self._missing())

    @task
    async def look(self) -> Waits:
        """Return what the step waits for at the moment."""
        return await self._diagnosis.look(self._missing())

    def moment(self, number: int) -> float:
        """A share from 0 to 1 that no worker can foresee, for the numbered look at an attempt."""
        return self._draw.moment(step=self.ledger.step, epoch=self.ledger.epoch, number=number)

    @task
    async def lead(self, links: Collection[PartyLink]) -> list[PartyLink]:
        """Lead links by way of the owner; return those that were not led before."""
        disputes = self._diagnosis.links
        fresh = [link for link in links if not disputes.is_led(link)]
        for link in fresh:
            await disputes.lead(link)
        return fresh

    def _missing(self) -> MissingFacts:
        facts = self.facts
        late = [
            party
            for stage in facts.watched
            for party in (facts.holder(stage), facts.shadow(stage))
            if stage not in facts.agreed and party != OWNER and party not in self._updates.said.get(stage, {})
        ]
        audits = self._audits
        return MissingFacts(late, list(audits.screened.values()), audits.said)

    def waiting_for(self) -> str:
        """Describe what is still missing, for a message to the user."""
        facts, ledger = self.facts, self.ledger
        watched, lagging = set(facts.watched), facts.lagging
        missing = {
            "audits of the last step (stage, auditor)": [] if lagging is None else lagging.owing,
            "commitments of stages": sorted(facts.assignment.holders.keys() - ledger.commits.keys()),
            "audits (stage, microbatch, auditor)": ledger.unreported,
            "gradients of stages": sorted(watched - ledger.gradients_agreed),
            "audits of whole steps (stage, auditor)": sorted(ledger.awaited_step_audits - ledger.steps_agreed),
            "states of stages": sorted(watched - facts.agreed.keys()),
            "screened (stage, microbatch)": sorted(self._audits.screened),
        }
        return ", ".join(f"{what} {which}" for what, which in missing.items() if which) or "nothing"

    def clip(self) -> float:
        """Clip coefficient of the step, from norms that the shadows have confirmed."""
        ledger, plan = self.ledger, self.facts.plan
        ledger.clip_coefficient = clip_coefficient(ledger.total_norm(), plan.optimizer.clip_norm)
        return ledger.clip_coefficient

    # --- audits -------------------------------------------------------------------------------------------

    async def _audit_as_owner(self) -> Judgement | None:
        """Run the owner's own audits, last of all, when the auditors have reported."""
        facts, ledger = self.facts, self.ledger
        facts.proved += self._owner_audits.weigh_states()
        if facts.proved:
            return facts.proved.pop(0)
        if not ledger.audits_drawn or ledger.unreported:
            return None
        for stage in sorted(ledger.owners_audits):
            ledger.num_audits += facts.plan.microbatches
            ledger.owners_audits.remove(stage)
            ledger.owner_audited.add(stage)
            judgements = await self._owner_audits.run(stage)
            facts.proved += judgements
            if facts.proved:
                return facts.proved.pop(0)
        return None
