"""Messages of owner and worker before the worker has a role, and when it gives its roles back."""

from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from phalanx.config import StrictModel, printable_text
from phalanx.pipeline.protocol.message import MAX_PARTIES, Address, Digest, Message, PartyName, Pem
from phalanx.pipeline.tolerance.numeric_class import NumericClass
from phalanx.security.audit import PublicHead

LONGEST_REASON = 2000
"""Characters of what a worker is told when it is not let in."""


class Hello(Message, kind="hello"):
    """A worker asks to join."""

    address: Address
    """`host:port`, with a host name of at most 255 characters."""
    numeric_class: NumericClass
    """How it describes itself; what it is, is measured (`kernel_fingerprint.py`)."""
    memory: dict[Annotated[str, Field(max_length=64)], Annotated[int, Field(ge=0, le=2**60)]] = Field(
        default_factory=dict, max_length=16
    )
    """Bytes that it can give to stages, by the name of what it shares them with; see `measure_own_memory`."""
    log_head: PublicHead | None = None
    """The newest head of this run's audit log that it was told, in any session."""


class Setup(Message, kind="setup"):
    """Everything a worker must know to build stages; the answer to `Hello`."""

    plan: dict[str, Any]
    certificates: dict[PartyName, Pem] | None = Field(default=None, max_length=MAX_PARTIES)
    """Of the other workers, for one that comes while the run is under way."""
    log_head: PublicHead | None = None
    """Where the owner's audit log ends, for workers to remember; None where they are not told."""


class Challenge(Message, kind="challenge"):
    """The owner measures a party's numeric class: compute the kernel fingerprint on inputs drawn from this nonce."""

    nonce: Digest


class KernelDigests(StrictModel):
    """The digests of a kernel fingerprint; see `fingerprint_kernels`."""

    forward: Digest
    backward: Digest
    gradient: Digest
    update: Digest


class ChallengeReply(Message, kind="measured"):
    """The answer to `Challenge`."""

    nonce: Digest
    found: KernelDigests


class NotLetIn(Message, kind="not_let_in"):
    """A worker does not take part: the reason, and what its user can do."""

    reason: Annotated[str, AfterValidator(partial(printable_text, limit=LONGEST_REASON))]


class PreparedNotice(Message, kind="prepared"):
    """A worker that came late knows the others now: it can be given a role, and be sent to."""


class Leave(Message):
    """A worker is about to be switched off and asks to hand over its stages."""

    kind: ClassVar[str] = "leave"
