"""What the owner knows about one attempt at a step: commitments, gradients, audits."""

import math
from dataclasses import dataclass, field

from phalanx.errors import FrameError
from phalanx.pipeline.messages import AuditReport, Commit, GradientHeld, Signed, StepAudited
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.signed import passed_on
from phalanx.transport import SignedHeader

MessageKey = tuple[int, Direction, int]
"""(source stage, direction, microbatch)."""

AuditKey = tuple[int, int, str]
"""(stage, microbatch, auditor)."""


@dataclass(frozen=True)
class Committed:
    """One message between stages as its receiver reported it, under its sender's signature."""

    digest: str
    header: Signed


@dataclass
class StepLedger:
    """Facts only; what follows from them is decided elsewhere."""

    step: int
    epoch: int
    commits: dict[int, Commit] = field(default_factory=dict)
    commit_headers: dict[int, SignedHeader | None] = field(default_factory=dict)
    messages: dict[MessageKey, Committed] = field(default_factory=dict)
    held: dict[int, GradientHeld] = field(default_factory=dict)
    gradients_agreed: set[int] = field(default_factory=set)
    awaited_audits: set[AuditKey] = field(default_factory=set)
    reports: dict[AuditKey, AuditReport] = field(default_factory=dict)
    awaited_step_audits: set[tuple[int, str]] = field(default_factory=set)
    """Stages whose weight gradient is to be recomputed, and by whom."""
    step_audits: dict[tuple[int, str], StepAudited] = field(default_factory=dict)
    steps_agreed: set[tuple[int, str]] = field(default_factory=set)
    """Those of them that were found right."""
    owners_audits: set[int] = field(default_factory=set)
    """Stages that the owner itself has still to redo."""
    audits_drawn: bool = False
    num_audits: int = 0
    clip_coefficient: float = 1.0
    frozen: frozenset[int] = frozenset()
    """Stages that take no update in this step; their gradients do not count."""

    def add_commit(self, commit: Commit, header: SignedHeader | None) -> None:
        """Take a stage's commitment, with the headers of what it received.

        Raises:
            FrameError: A passed-on header is not one of a message to this stage in this step.
        """
        read = [(*_input_of(signed, commit), signed) for signed in commit.received]
        for key, digest, signed in read:
            self.messages[key] = Committed(digest, signed)
        self.commits[commit.stage] = commit
        self.commit_headers[commit.stage] = header

    @property
    def unreported(self) -> list[AuditKey]:
        """Audits that were asked for and not yet reported on."""
        return sorted(self.awaited_audits - self.reports.keys())

    def said_digest(self, key: MessageKey) -> str | None:
        """The digest that the sending stage itself committed to, None when it named none."""
        source, direction, microbatch = key
        commit = self.commits.get(source)
        sent = () if commit is None else commit.sent
        return next((s.digest for s in sent if (s.direction, s.microbatch) == (direction, microbatch)), None)

    def total_norm(self) -> float:
        """Norm of the gradient of all stages that take an update; NaN when one's is not finite."""
        # ascending stages, so that every run adds in the same order
        squares = [self.commits[stage].norm_squared for stage in sorted(self.commits.keys() - self.frozen)]
        finite = [square for square in squares if square is not None]
        return math.sqrt(math.fsum(finite)) if len(finite) == len(squares) else math.nan


def _input_of(signed: Signed, commit: Commit) -> tuple[MessageKey, str]:
    fields, message = passed_on(signed)
    if (message.epoch, message.step, message.target) != (commit.epoch, commit.step, commit.stage):
        raise FrameError(
            f"stage {commit.stage}: its commitment for step {commit.step} holds the header of another step or stage"
        )
    return (message.source, message.direction, message.microbatch), fields.payload_digest
