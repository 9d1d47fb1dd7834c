"""What all parts of one party share: who it is, the run, its roles, and how it sends."""

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.pipeline.bulk import Post
from phalanx.pipeline.message import Message
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.roles import Roles
from phalanx.security.crypto import Peer
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
        peer: Public key of a party, for headers that others pass on.
        timer: Where CPU and wall time of each phase are added up.
    """

    name: str
    plan: StepPlan
    roles: Roles
    post: Post
    peer: Callable[[str], Peer]
    timer: PhaseTimer

    @property
    def guarded(self) -> bool:
        """Whether anything is committed to, audited or shadowed."""
        return self.plan.guard.enabled
