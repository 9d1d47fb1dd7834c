"""The facts that the owner's judges share: the present assignment, commitments, and states agreed on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx.config import StrictModel
from phalanx.engine import Verdict
from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.assignment.budget import Sample
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.files import ComparedTensors
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.log_memory import Observe
from phalanx.pipeline.protocol.messages import Activation, PassedOnHeader, StateDigest
from phalanx.pipeline.protocol.signed import Statement, Statements
from phalanx.pipeline.stage.gradient_norm import KnownNorms
from phalanx.pipeline.verify.ledger import StepLedger

NO_HEADERS: Mapping[str, PassedOnHeader] = {}


class RefereeWork(StrictModel):
    """The recomputations of the referee to settle one dispute."""

    microbatches: int = 0
    """Messages: forward, and input-backward where the dispute is about a gradient, of one stage's microbatch."""
    steps: int = 0
    """States and weight gradients: all microbatches of one stage, or its update."""


@dataclass
class Judgement:
    """A verdict with what it rests on."""

    verdict: Verdict
    compared: ComparedTensors = field(default_factory=ComparedTensors)
    headers: dict[str, PassedOnHeader] = field(default_factory=dict)
    work: RefereeWork = field(default_factory=RefereeWork)


@dataclass
class StepFacts:
    """The facts about a step that every comparison needs.

    Attributes:
        plan: The run.
        statements: Opens what parties pass on.
        observe: Writes to the audit log.
        assignment: Holders and shadows in the present attempt.
        resting: The same of the stages that are left out of it.
        classes: Numeric class of each party.
        sources: The party that sends the state of each stage to newcomers in the present epoch.
        ledger: The present attempt at the present step.
        previous: The last applied step's.
        proved: Judgements found together with another one; they outlive the redo of the step.
        norms: What the owner has computed of stages' gradients itself.
        sample: Which of many like events of a party are written down.
        unanswered: Parties that have left a request of this attempt without an answer.
    """

    plan: StepPlan
    statements: Statements
    observe: Observe
    assignment: Assignment = field(default_factory=lambda: Assignment({}, {}))
    resting: Assignment = field(default_factory=lambda: Assignment({}, {}))
    classes: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[int, str] = field(default_factory=dict)
    ledger: StepLedger = field(default_factory=lambda: StepLedger(0, 0))
    previous: StepLedger | None = None
    proved: list[Judgement] = field(default_factory=list)
    norms: KnownNorms = field(default_factory=KnownNorms)
    sample: Sample = field(default_factory=Sample)
    unanswered: set[str] = field(default_factory=set)

    @property
    def agreed(self) -> dict[int, StateDigest]:
        """Digest of each stage at the present step, once holder and shadow have both signed it."""
        return self.ledger.agreed

    @property
    def before(self) -> Mapping[int, StateDigest]:
        """The same at the step before."""
        return {} if self.previous is None else self.previous.agreed

    @property
    def lagging(self) -> StepLedger | None:
        """The last applied step's ledger, as long as its audits are not done; None when nothing lags."""
        previous = self.previous
        lags = self.plan.guard.commit_lag and previous is not None and not previous.is_audited
        return previous if lags else None

    @property
    def open_ledgers(self) -> tuple[StepLedger, ...]:
        """The ledgers of all steps that parties may still say something about, in order."""
        lagging = self.lagging
        return (self.ledger,) if lagging is None else (lagging, self.ledger)

    def ledger_of(self, step: int) -> StepLedger:
        """The ledger that a message about an open step belongs to."""
        return next((ledger for ledger in self.open_ledgers if ledger.step == step), self.ledger)

    @property
    def watched(self) -> list[int]:
        """Stages in other hands, which have a shadow."""
        return sorted(self.assignment.shadows) if self.plan.guard.enabled else []

    @property
    def present(self) -> set[str]:
        """Every party that holds or shadows a stage."""
        return {*self.assignment.holders.values(), *self.assignment.shadows.values()}

    def holder(self, stage: int) -> str:
        """The holder of a stage."""
        return self.assignment.holders[stage]

    def shadow(self, stage: int) -> str:
        """The shadow of a stage."""
        return self.assignment.shadows[stage]

    def has_copy(self, party: str, stage: int) -> bool:
        """Whether a party is one of the two with a copy of a stage."""
        return party in (self.holder(stage), self.shadow(stage))

    def has_weights(self, party: str, stage: int) -> bool:
        """Whether a party has the weights of a stage at hand; a shadow that keeps snapshots has old ones."""
        return party == self.holder(stage) or (party == self.shadow(stage) and not self.plan.guard.keeps_snapshots)

    def same_class(self, one: str, other: str = OWNER) -> bool:
        """Whether two parties got the same bits where their classes were measured."""
        return self.classes[one] == self.classes[other]

    def bits_decide(self, one: str, other: str = OWNER) -> bool:
        """Whether any other bit than the one party's is a lie of the other.

        Two ways to compute may agree in all that was measured and differ in one number of a million. Where a run lets
        several in, equal digests of a battery are no proof, and parties are compared within tau.
        """
        return one == other or (self.plan.guard.classes == "one" and self.same_class(one, other))

    def tensor(self, signed: PassedOnHeader, epoch: int, place: Mapping[str, object]) -> Statement[Activation]:
        """A tensor between stages, as its sender announced it to its receiver in the present assignment.

        Raises:
            FrameError, SignatureError: As `Statements.open`.
        """
        return self.statements.open(signed, Activation, epoch, place, self.assignment.link_of)

    def find_tensor(
        self, signed: PassedOnHeader, epoch: int, place: Mapping[str, object]
    ) -> Statement[Activation] | None:
        """As `tensor`; None where that raises."""
        return self.statements.find(signed, Activation, epoch, place, self.assignment.link_of)

    def forget_states(self) -> None:
        """Forget all agreed states: all parties begin anew."""
        self.ledger.agreed.clear()
        self.previous = None

    def judgement(
        self,
        offence: str,
        party: str,
        stage: int,
        reason: str,
        *,
        step: int | None = None,
        accuser: str = OWNER,
        headers: Mapping[str, PassedOnHeader] = NO_HEADERS,
        work: RefereeWork | None = None,
    ) -> Judgement:
        """A verdict that shows no recomputed tensor: headers prove it, or `work` has found it.

        Args:
            offence: What was done.
            party: The guilty one.
            stage: Which stage it is about.
            reason: In words.
            step: Left out, the present one.
            accuser: The party that found it.
            headers: What proves it.
            work: What the referee spent on it.
        """
        verdict = Verdict.model_validate(
            {
                "step": self.ledger.step if step is None else step,
                "stage": stage,
                "party": party,
                "offence": offence,
                "reason": reason,
                "accuser": accuser,
            }
        )
        return Judgement(verdict, headers=dict(headers), work=work or RefereeWork())
