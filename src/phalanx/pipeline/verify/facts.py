"""The facts that the owner's judges share: the ledger of each attempt, the assignment, and states agreed on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.config import StrictModel
from phalanx.engine import Offence, Verdict
from phalanx.errors import FrameError, SignatureError
from phalanx.optimizers import norm_of_squares
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.assignment.budget import EventSampler
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.files import ComparedTensors
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.log_memory import Observe
from phalanx.pipeline.protocol.messages import (
    Activation,
    Audit,
    AuditReport,
    Commit,
    Fetch,
    GradientHeld,
    MessageKey,
    PassedOnHeader,
    StateDigest,
    StepAudited,
)
from phalanx.pipeline.protocol.signed import Statement, StatementKey, StatementReader, to_signed
from phalanx.pipeline.tolerance.screen import Doubt
from phalanx.pipeline.verify.statement_record import StatementRecord
from phalanx.security.privacy import NoiseSecret
from phalanx.transport import SignedHeader

AuditKey = tuple[int, int, str]
"""(stage, microbatch, auditor)."""


@dataclass(frozen=True)
class CommittedMessage:
    """One message between stages as its receiver showed it, under its sender's signature.

    Attributes:
        shown_by: The party that showed it under its own signature.
    """

    digest: str
    header: PassedOnHeader
    shown_by: str

    @classmethod
    def from_statement(cls, said: Statement[Activation], shown_by: str) -> "CommittedMessage":
        """Return the message that a statement announces."""
        return cls(said.payload_digest, to_signed(said.header), shown_by)


@dataclass
class StepLedger:
    """The owner's facts about one attempt; what follows from them is decided elsewhere."""

    step: int
    epoch: int
    commits: dict[int, Commit] = field(default_factory=dict)
    commit_headers: dict[int, SignedHeader | None] = field(default_factory=dict)
    messages: dict[MessageKey, CommittedMessage] = field(default_factory=dict)
    held: dict[tuple[int, str], GradientHeld] = field(default_factory=dict)
    """By stage and shadow."""
    gradients_agreed: set[int] = field(default_factory=set)
    awaited_audits: set[AuditKey] = field(default_factory=set)
    reports: dict[AuditKey, AuditReport] = field(default_factory=dict)
    orders: dict[tuple[int, str], int] = field(default_factory=dict)
    """Number of the order that an auditor of a stage is to answer, urgent ones apart."""
    awaited_step_audits: set[tuple[int, str]] = field(default_factory=set)
    """Stages with a weight gradient that is to be recomputed, and the parties that do it."""
    step_audits: dict[tuple[int, str], StepAudited] = field(default_factory=dict)
    steps_agreed: set[tuple[int, str]] = field(default_factory=set)
    """Those of them that were found right."""
    doubted: dict[int, Doubt] = field(default_factory=dict)
    """Stages with a weight gradient that looked odd to its auditor; each is then recomputed as a whole."""
    owners_audits: set[int] = field(default_factory=set)
    """Stages that the owner itself has still to redo."""
    owner_audited: set[int] = field(default_factory=set)
    """Stages that it has redone."""
    agreed: dict[int, StateDigest] = field(default_factory=dict)
    """Digest of each stage at the beginning of the step, once holder and shadow have both signed it."""
    audits_drawn: bool = False
    may_lag: bool = False
    """Whether it may be applied before its audits are in: the owner redoes no stage of it."""
    num_audits: int = 0
    clip_coefficient: float = 1.0
    event_sampler: EventSampler = field(default_factory=EventSampler)
    """Which of many like events of a party are written down."""

    def add_commit(
        self, commit: Commit, header: SignedHeader | None, received: Sequence[Statement[Activation]] = ()
    ) -> None:
        """Take the commitment to a stage's work.

        Args:
            header: Frame that carried it; None for the owner's messages to itself.
            received: Opened headers of the stage's inputs.
        """
        for statement in received:
            shown_by = statement.header.fields.receiver
            self.messages[statement.message.key] = CommittedMessage.from_statement(statement, shown_by)
        self.commits[commit.stage] = commit
        self.commit_headers[commit.stage] = header

    def commit_header(self, stage: int) -> PassedOnHeader | None:
        """The commitment to a stage's work as it was signed; None where the owner committed to itself."""
        header = self.commit_headers.get(stage)
        return None if header is None else to_signed(header)

    @property
    def unreported_audits(self) -> list[AuditKey]:
        """Audits that were asked for and not yet reported on."""
        return sorted(self.awaited_audits - self.reports.keys())

    @property
    def unfinished_step_audits(self) -> list[tuple[int, str]]:
        """Stages with a weight gradient that was to be recomputed, and the parties that have not reported on it."""
        return sorted(self.awaited_step_audits - self.step_audits.keys())

    @property
    def owed_audits(self) -> list[tuple[int, str]]:
        """Stages with audits that are not done, and the parties that are to do them."""
        return sorted(
            {(stage, auditor) for stage, _, auditor in self.unreported_audits} | {*self.unfinished_step_audits}
        )

    @property
    def is_audited(self) -> bool:
        """Whether audits were drawn and every one of them has found the step right."""
        return (
            self.audits_drawn
            and not self.unreported_audits
            and self.awaited_step_audits <= self.steps_agreed
            and not self.owners_audits
        )

    def said_digest(self, key: MessageKey) -> str | None:
        """The digest that the stage committed to have sent, None when it named none."""
        source, direction, microbatch = key
        commit = self.commits.get(source)
        sent = () if commit is None else commit.sent
        return next((s.digest for s in sent if (s.direction, s.microbatch) == (direction, microbatch)), None)

    def squared_norms(self) -> dict[int, float | None]:
        """Squared norm of the gradient of each stage; None where it is not finite."""
        return {stage: commit.norm_squared for stage, commit in self.commits.items()}

    def total_norm(self) -> float:
        """Norm of the gradient of all stages; NaN when one's is not finite."""
        # ascending stages, so that every run adds in the same order
        return norm_of_squares([square for _, square in sorted(self.squared_norms().items())])


Signed = PassedOnHeader | None
"""A statement as it was signed; None for what the owner told itself, which needs no signature."""

NO_HEADERS: Mapping[str, Signed] = {}


def present_headers(headers: Mapping[str, Signed]) -> dict[str, PassedOnHeader]:
    """Return the headers that there are."""
    return {role: header for role, header in headers.items() if header is not None}


class RefereeWork(StrictModel):
    """The recomputations of the referee to settle one dispute."""

    microbatches: int = 0
    """Messages: forward, and input-backward where the dispute is about a gradient, of one stage's microbatch."""
    steps: int = 0
    """States and weight gradients: all microbatches of one stage, or its update."""


@dataclass
class Judgement:
    """A verdict with its basis."""

    verdict: Verdict
    compared: ComparedTensors = field(default_factory=ComparedTensors)
    headers: dict[str, PassedOnHeader] = field(default_factory=dict)
    work: RefereeWork = field(default_factory=RefereeWork)
    is_undone: bool = False
    """Whether the update that it is about was undone, and made again, before."""


@dataclass(frozen=True)
class UnwitnessedUpdate:
    """An update that was undone because no two parties had made it alike.

    Attributes:
        signed: The state after it, by the parties that made it.
        gradient: Digest of the committed gradient, and the clip coefficient.
        headers: Proof against each of them, by role in evidence.
    """

    signed: Mapping[str, StateDigest]
    gradient: tuple[str, float]
    headers: Mapping[str, Mapping[str, Signed]]


@dataclass
class StepFacts:
    """The facts about a step that every comparison needs.

    Attributes:
        statements: Opens what parties pass on.
        observe: Writes to the audit log.
        assignment: Holders and shadows in the present attempt.
        classes: Numeric class of each party.
        sources: The party that sends the state of each stage to newcomers in the present epoch.
        ledger: The present attempt at the present step.
        proved: Judgements found together with another one; they outlive the redo of the step.
        unanswered: Parties that have left a request of this attempt without an answer.
        record: Signed statements about the open steps.
        updated_by: The assignment in which the last update was made.
        copied: Stages, with parties that got their copy from another one after that update.
        unwitnessed: Undone updates by stage: each is compared with the one that is made in its place.
        noise: The secret of the noise that hides single rows; None where they are not hidden.
    """

    plan: StepPlan
    statements: StatementReader
    observe: Observe
    assignment: Assignment = field(default_factory=lambda: Assignment({}, {}))
    classes: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[int, str] = field(default_factory=dict)
    ledger: StepLedger = field(default_factory=lambda: StepLedger(0, 0))
    previous: StepLedger | None = None
    proved: list[Judgement] = field(default_factory=list)
    unanswered: set[str] = field(default_factory=set)
    record: StatementRecord = field(default_factory=StatementRecord)
    updated_by: Assignment = field(default_factory=lambda: Assignment({}, {}))
    copied: set[tuple[int, str]] = field(default_factory=set)
    unwitnessed: dict[int, "UnwitnessedUpdate"] = field(default_factory=dict)
    noise: NoiseSecret | None = None

    def noise_key(self, epoch: int, stage: int) -> bytes | None:
        """The key of a stage's noise in an epoch; None where rows are not hidden."""
        return None if self.noise is None else self.noise.key_of(epoch, stage)

    @property
    def agreed_states(self) -> dict[int, StateDigest]:
        """Digest of each stage at the present step, once holder and shadow have both signed it."""
        return self.ledger.agreed

    @property
    def previous_states(self) -> Mapping[int, StateDigest]:
        """The same at the step before."""
        return {} if self.previous is None else self.previous.agreed

    @property
    def lagging_ledger(self) -> StepLedger | None:
        """The last applied step's ledger, as long as its audits are not done; None when nothing lags."""
        previous = self.previous
        lags = self.plan.guard.commit_lag and previous is not None and not previous.is_audited
        return previous if lags else None

    @property
    def open_ledgers(self) -> tuple[StepLedger, ...]:
        """The ledgers of all steps that parties may still say something about, in order."""
        lagging = self.lagging_ledger
        return (self.ledger,) if lagging is None else (lagging, self.ledger)

    def ledger_of(self, step: int) -> StepLedger:
        """The ledger that a message about an open step belongs to."""
        lagging = self.lagging_ledger
        return self.ledger if lagging is None or lagging.step != step else lagging

    @property
    def watched_stages(self) -> list[int]:
        """Stages in other hands, which have a shadow."""
        return sorted(self.assignment.shadows) if self.plan.guard.is_enabled else []

    @property
    def present_parties(self) -> set[str]:
        """Every party that holds or shadows a stage."""
        return {party for stage in self.assignment.holders for party in self.assignment.parties_of(stage)}

    def holder_of(self, stage: int) -> str:
        """The holder of a stage."""
        return self.assignment.holders[stage]

    def shadow_of(self, stage: int) -> str:
        """The shadow of a stage that audits it."""
        return self.assignment.shadows[stage]

    def same_class(self, one: str, other: str = OWNER) -> bool:
        """Whether two parties got the same bits where their classes were measured."""
        return self.classes[one] == self.classes[other]

    def bits_decide(self, one: str, other: str = OWNER) -> bool:
        """Whether any other bit than the one party's is a lie of the other.

        Two ways to compute may agree in all that was measured and differ in one number of a million. Where a run lets
        several in, equal kernel fingerprints are no proof, and parties are compared within tau.
        """
        return one == other or (self.plan.guard.classes == "one" and self.same_class(one, other))

    def open_tensor(self, signed: PassedOnHeader, epoch: int, place: Mapping[str, object]) -> Statement[Activation]:
        """A tensor between stages, as its sender announced it to its receiver in the present assignment.

        Raises:
            FrameError, SignatureError: As `StatementReader.open_statement`.
        """
        return self.statements.open_statement(signed, Activation, epoch, place, self.assignment.link_of)

    def find_tensor(self, shown: PassedOnHeader | None, request: Fetch) -> Statement[Activation] | None:
        """The tensor that a request is about, where this header announces it as `open_tensor` demands; else None."""
        try:
            return None if shown is None else self.open_tensor(shown, request.epoch, request.tensor_place)
        except (FrameError, SignatureError):
            return None

    def order_header(self, report: AuditReport) -> PassedOnHeader | None:
        """The order that a report answers, as the owner signed it; None where the owner asked itself."""
        key = StatementKey(Audit.kind, OWNER, report.epoch, report.step, report.stage, order=report.order)
        stored = self.record.get_statement(key)
        return None if stored is None else stored.header

    def state_headers(self, stage: int, state: StateDigest, holder: str, other: str | None) -> Mapping[str, Signed]:
        """The headers in which the two parties with a copy of a stage signed its state, by role in evidence."""
        signers = {"state_holder": holder, "state_shadow": other}
        return {
            role: None if party is None else self.record.signed_state(party, stage, state)
            for role, party in signers.items()
        }

    def forget_states(self) -> None:
        """Forget all agreed states: all parties begin anew."""
        self.ledger.agreed.clear()
        self.previous = None
        self.record = StatementRecord()

    def make_judgement(
        self,
        offence: Offence,
        party: str,
        stage: int,
        reason: str,
        *,
        step: int | None = None,
        accuser: str = OWNER,
        headers: Mapping[str, Signed] = NO_HEADERS,
        work: RefereeWork | None = None,
        compared: ComparedTensors | None = None,
    ) -> Judgement:
        """A verdict that shows no recomputed tensor: headers prove it, or `work` has found it.

        Args:
            step: Left out, the present one.
            accuser: The party that found it.
            headers: Proof by role in evidence; None for the owner's messages to itself.
        """
        verdict = Verdict(
            step=self.ledger.step if step is None else step,
            stage=stage,
            party=party,
            offence=offence,
            reason=reason,
            accuser=accuser,
        )
        return Judgement(verdict, compared or ComparedTensors(), present_headers(headers), work or RefereeWork())
