"""What the parts of a pipeline's owner share: made once, before any of them."""

import time
from collections.abc import Collection
from dataclasses import dataclass, field

from phalanx.pipeline.assignment.budget import allowance_of, max_answer_bytes
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.membership.members import Files, Incarnations, Members
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.owner.step_log import Duplicates, JournalNotes
from phalanx.pipeline.owner.verdicts import Verdicts
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.proof.step_record import StepRecords
from phalanx.pipeline.protocol.mailbox import Mailbox
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.requests import AwakeClock, Patience, Requests
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import StepFacts, StepLedger
from phalanx.pipeline.worker.party import Party, RunningCosts
from phalanx.pipeline.worker.roles import PartyContext
from phalanx.security.privacy import NoiseSecret
from phalanx.telemetry import PhaseTimer
from phalanx.transport import Endpoint, SignedHeader


@dataclass(frozen=True)
class TimeLimits:
    """How long the owner waits for others.

    Attributes:
        step_s: Longest time that one step, or the start, may take.
        patience_s: Longest time without a message before the owner looks for the silent party.
    """

    step_s: float
    patience_s: float
    clock: AwakeClock = field(default_factory=AwakeClock)


@dataclass(frozen=True, eq=False)
class OwnerContext:
    """What the parts of a pipeline's owner share; made once, before any of them.

    Attributes:
        facts: The present step and assignment.
        endpoint: The owner's end of all links; refuses excluded parties.
        mail: Parses incoming messages and posts outgoing ones.
        requests: Asks parties, and takes their answers.
        patience: Tells when nothing has happened for too long.
        incarnations: Knows which parties may come back, and under which names.
        coordinator: Takes what parties commit to and report, and draws conclusions.
        verdicts: All so far, each judged from its evidence.
        notes: Told when states are agreed on or may be undone; keeps the records that prove steps.
        duplicates: Told the same; has the copies that are under way.
        timer: Measures the compute thread and its waiting.
        step_timeout_s: Longest time that one step, or taking roles, may take.
    """

    facts: StepFacts
    party: Party
    members: Members
    files: Files
    endpoint: Endpoint
    mail: Mailbox
    requests: Requests
    patience: Patience
    incarnations: Incarnations
    coordinator: Coordinator
    verdicts: Verdicts
    notes: JournalNotes
    duplicates: Duplicates
    timer: PhaseTimer
    step_timeout_s: float

    @classmethod
    def make_context(
        cls, plan: StepPlan, endpoint: Endpoint, members: Members, files: Files, draw: AuditDraw, limits: TimeLimits
    ) -> "OwnerContext":
        """Make the parts that others stand on; from now on every peer has the plan's allowance."""
        mail, timer, clock = Mailbox(endpoint), PhaseTimer(cpu_clock=time.thread_time), limits.clock
        endpoint.allowances.limit_peers(allowance_of(plan))
        post, statements = mail.post_message, mail.statement_reader
        costs = RunningCosts(timer, endpoint, has_walls=False)
        party_context = PartyContext(OWNER, plan, post, statements, timer, usage=costs, state_files=files.states)
        party = Party(party_context, files.library)
        # the first epoch is 0
        ledger, noise = StepLedger(0, -1), None if plan.privacy is None else NoiseSecret()
        facts = StepFacts(plan, statements, files.observe, classes=members.numeric_classes, ledger=ledger, noise=noise)
        requests = Requests(post, clock, endpoint.allowances, max_answer_bytes(plan), limits.patience_s)
        records = StepRecords(facts, endpoint.session_name, files.note_step)
        return cls(
            facts,
            party,
            members,
            files,
            endpoint,
            mail,
            requests,
            Patience(limits.patience_s, clock),
            members.incarnations or Incarnations(endpoint, members.names, members.returns),
            Coordinator(facts, draw, mail.carried_frames),
            Verdicts(facts, members, files),
            JournalNotes(facts, party, files.note_verified, records),
            Duplicates(facts, requests, party.roles),
            timer,
            limits.step_s,
        )

    def tell(self, parties: Collection[str], message: Message) -> SignedHeader | None:
        """Post one message to several parties; return one of the signed headers, None where there is none."""
        headers = [self.mail.post_message(name, message, ()) for name in parties]
        return next((header for header in headers if header is not None), None)

    def forget_unverified(self, reason: str) -> None:
        """Note that steps may be undone: copies on their way may contain them, and notes are made again."""
        self.duplicates.abandon_duplicate(reason)
        self.notes.forget_notes()
