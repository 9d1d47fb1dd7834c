"""The messages of a run with clients of other owners: turns and their results.

    owner                        enclave                        client
      turn(step, draw)  -------->  turn  ---------------------->  sends microbatches, sealed for the enclave
                        <--------  total, sealed for the owner    <- its own losses, sealed for it

None of them can carry a text, and none asks for one.
"""

from typing import ClassVar, Literal

from pydantic import Field

from phalanx.split.admission.config import RefusalReason
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.message import Count, Hex32, Name, Size, SplitMessage, Text

LeaveReason = Literal["evidence", "data", "stopped", "failed"]
_MAX_CLIENTS = 64
_MAX_MEASUREMENTS = 256


class ClientReady(SplitMessage, kind="client_ready"):
    """Word of a client of another owner that it has met the enclave, and what its part of the run rests on."""

    model: Hex32
    """Digest of its copy of the model's files."""
    tokenizer: Hex32
    data: Hex32
    """Commitment to its texts under a secret of its own: the same after a restart, and it tells nothing of them."""


class ClientsReady(SplitMessage, kind="clients_ready"):
    """Word that all clients are ready, with the commitments of their data."""

    data: dict[Name, Hex32] = Field(max_length=_MAX_CLIENTS)


class ClientTurn(SplitMessage, kind="turn"):
    """The owner's word to all clients of other owners, passed on by the enclave: what to send next."""

    what: Literal["train", "held_out"]
    step: Count
    draw: Count
    """How many batches the run has drawn before; it decides which of its texts a client takes."""


class TurnDone(SplitMessage, kind="turn_done"):
    """Word of a client that all its held-out texts are measured."""

    step: Count


class TurnTotal(SplitMessage, kind="turn_total"):
    """What a turn came to over all clients, a frame for the owner, as payload."""

    what: Literal["train", "held_out"]
    step: Count
    costs: Costs


class AwaitedClients(SplitMessage, kind="awaited"):
    """Word to the owner that a turn waits for these clients."""

    names: tuple[Name, ...] = Field(max_length=_MAX_CLIENTS)


class ClientLeft(SplitMessage, kind="client_left"):
    """A client leaves. `reason` is one of a closed set and carries no data."""

    reason: LeaveReason


class ClientRefused(SplitMessage, kind="client_refused"):
    """Word to the owner that microbatches of a client do not count, or that it is shut out; its figure if it is one."""

    client: Name
    step: Count
    reason: RefusalReason
    figure: Size | None
    bound: Size | None
    is_excluded: bool


class ClientAppraised(SplitMessage, kind="client_appraised"):
    """Tell the owner that a client's evidence has passed: which policy accepted it, and its measured values."""

    client: Name
    evidence: Text
    """Its kind."""
    policy: Hex32
    """Digest of the client's policy in the run file."""
    device: Text
    measurements: dict[Text, Text] = Field(max_length=_MAX_MEASUREMENTS)


class ClientEvidenceRefused(SplitMessage, kind="client_evidence_refused"):
    """Word to the owner that a client's evidence has not passed, or was missing; nothing of it is taken."""

    client: Name
    reason: Text


class Conclude(SplitMessage, kind="conclude"):
    """Tell all clients that training is over: they compare transcripts and leave."""


class ConcludeReply(SplitMessage):
    """Word of a client that both ends saw the same frames; of the enclave, that all clients have said so."""

    kind: ClassVar[str] = "concluded"
