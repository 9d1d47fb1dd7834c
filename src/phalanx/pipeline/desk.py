"""What all parts of one party share: who it is, the run, its roles, and how it sends."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.pipeline.bulk import Post
from phalanx.pipeline.message import Message
from phalanx.pipeline.messages import Activation, Signed
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.roles import Roles
from phalanx.pipeline.signed import Statement, Statements
from phalanx.telemetry import PhaseTimer
from phalanx.transport import SignedHeader


@dataclass(frozen=True)
class Received:
    """A message and the frame that carried it; `header` is None for what the owner says to itself."""

    sender: str
    message: Message
    payload: memoryview
    header: SignedHeader | None


@dataclass(frozen=True)
class Desk:
    """Handed to the parts of a party.

    Attributes:
        name: This party.
        plan: The run.
        roles: What it holds and shadows, and the present epoch and step.
        post: Sends a message; one to oneself is delivered to oneself.
        statements: Opens what others pass on.
        timer: Where CPU and wall time of each phase are added up.
    """

    name: str
    plan: StepPlan
    roles: Roles
    post: Post
    statements: Statements
    timer: PhaseTimer

    def tensor(self, signed: Signed, epoch: int, place: Mapping[str, object]) -> Statement[Activation]:
        """A tensor between stages, as its sender announced it to its receiver in the present assignment.

        Raises:
            FrameError, SignatureError: As `Statements.open`.
        """
        return self.statements.open(signed, Activation, epoch, place, self.roles.assignment.link_of)

    def find_tensor(self, signed: Signed, epoch: int, place: Mapping[str, object]) -> Statement[Activation] | None:
        """As `tensor`; None where that raises."""
        return self.statements.find(signed, Activation, epoch, place, self.roles.assignment.link_of)

    @property
    def guarded(self) -> bool:
        """Whether anything is committed to, audited or shadowed."""
        return self.plan.guard.enabled
