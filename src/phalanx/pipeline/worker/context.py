"""The context that all parts of one party share: its name, the run, its roles, and how it sends."""

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.messages import Activation, PassedOnHeader
from phalanx.pipeline.protocol.signed import Statement, Statements
from phalanx.pipeline.protocol.tensor_stream import Post
from phalanx.pipeline.worker.roles import Roles
from phalanx.telemetry import PhaseTimer


@dataclass(frozen=True)
class PartyContext:
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

    def tensor(self, signed: PassedOnHeader, epoch: int, place: Mapping[str, object]) -> Statement[Activation]:
        """A tensor between stages, as its sender announced it to its receiver in the present assignment.

        Raises:
            FrameError, SignatureError: As `Statements.open`.
        """
        return self.statements.open(signed, Activation, epoch, place, self.roles.assignment.link_of)

    def find_tensor(
        self, signed: PassedOnHeader, epoch: int, place: Mapping[str, object]
    ) -> Statement[Activation] | None:
        """As `tensor`; None where that raises."""
        return self.statements.find(signed, Activation, epoch, place, self.roles.assignment.link_of)

    @property
    def guarded(self) -> bool:
        """Whether anything is committed to, audited or shadowed."""
        return self.plan.guard.enabled
