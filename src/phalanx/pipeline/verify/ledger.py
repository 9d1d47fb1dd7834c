"""The ledger of one attempt at a step: commitments, gradients, audits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from phalanx.pipeline.protocol.messages import (
    Activation,
    AuditReport,
    Commit,
    GradientHeld,
    PassedOnHeader,
    StateDigest,
    StepAudited,
)
from phalanx.pipeline.protocol.signed import Statement, to_signed
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.tolerance.screen import Doubt
from phalanx.transport import SignedHeader

MessageKey = tuple[int, Direction, int]
"""(source stage, direction, microbatch)."""

AuditKey = tuple[int, int, str]
"""(stage, microbatch, auditor)."""


@dataclass(frozen=True)
class CommittedMessage:
    """One message between stages as its receiver showed it, under its sender's signature.

    Attributes:
        digest: Of the tensor.
        header: The sender's.
        shown_by: The party that showed it under its own signature.
    """

    digest: str
    header: PassedOnHeader
    shown_by: str

    @classmethod
    def of(cls, said: Statement[Activation], shown_by: str) -> "CommittedMessage":
        """Return the message that a statement announces."""
        return cls(said.digest, to_signed(said.header), shown_by)


@dataclass
class StepLedger:
    """The owner's facts about one attempt; what follows from them is decided elsewhere."""

    step: int
    epoch: int
    commits: dict[int, Commit] = field(default_factory=dict)
    commit_headers: dict[int, SignedHeader | None] = field(default_factory=dict)
    messages: dict[MessageKey, CommittedMessage] = field(default_factory=dict)
    held: dict[int, GradientHeld] = field(default_factory=dict)
    gradients_agreed: set[int] = field(default_factory=set)
    awaited_audits: set[AuditKey] = field(default_factory=set)
    reports: dict[AuditKey, AuditReport] = field(default_factory=dict)
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
    """Whether it may be applied before its audits are in: no party but shadows was asked for any."""
    num_audits: int = 0
    clip_coefficient: float = 1.0
    frozen: frozenset[int] = frozenset()
    """Stages that take no update in this step; their gradients do not count."""

    def add_commit(
        self, commit: Commit, header: SignedHeader | None, received: Sequence[Statement[Activation]] = ()
    ) -> None:
        """Take the commitment to a stage's work.

        Args:
            commit: What was said.
            header: The frame that carried it; None for what the owner says to itself.
            received: The headers of what the stage received, opened.
        """
        for said in received:
            message = said.message
            shown_by = said.header.fields.receiver
            self.messages[(message.source, message.direction, message.microbatch)] = CommittedMessage.of(said, shown_by)
        self.commits[commit.stage] = commit
        self.commit_headers[commit.stage] = header

    @property
    def unreported(self) -> list[AuditKey]:
        """Audits that were asked for and not yet reported on."""
        return sorted(self.awaited_audits - self.reports.keys())

    @property
    def unfinished(self) -> list[tuple[int, str]]:
        """Stages with a weight gradient that was to be recomputed, and the parties that have not reported on it."""
        return sorted(self.awaited_step_audits - self.step_audits.keys())

    @property
    def owing(self) -> list[tuple[int, str]]:
        """Stages with audits that are not done, and the parties that are to do them."""
        return sorted({(stage, auditor) for stage, _, auditor in self.unreported} | {*self.unfinished})

    @property
    def is_audited(self) -> bool:
        """Whether audits were drawn and every one of them has found the step right."""
        return (
            self.audits_drawn
            and not self.unreported
            and self.awaited_step_audits <= self.steps_agreed
            and not self.owners_audits
        )

    def said_digest(self, key: MessageKey) -> str | None:
        """The digest that the stage committed to have sent, None when it named none."""
        source, direction, microbatch = key
        commit = self.commits.get(source)
        sent = () if commit is None else commit.sent
        return next((s.digest for s in sent if (s.direction, s.microbatch) == (direction, microbatch)), None)

    def norms(self) -> dict[int, float | None]:
        """Squared norm of the gradient of each stage that takes an update; None where it is not finite."""
        return {stage: commit.norm_squared for stage, commit in self.commits.items() if stage not in self.frozen}

    def total_norm(self) -> float:
        """Norm of the gradient of all stages that take an update; NaN when one's is not finite."""
        known = self.norms()
        # ascending stages, so that every run adds in the same order
        squares = [known[stage] for stage in sorted(known)]
        finite = [square for square in squares if square is not None]
        return math.sqrt(math.fsum(finite)) if len(finite) == len(squares) else math.nan
