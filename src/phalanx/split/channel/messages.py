"""The messages beside the frames: their bodies between the enclave and its parties, read once, strictly.

Nothing in a body is believed for its own sake: a frame that is not what its body says does not open.
"""

from typing import Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from phalanx.config import StrictModel
from phalanx.engine import Verdict
from phalanx.errors import (
    CheckpointError,
    DataError,
    FixedPointError,
    FrameError,
    NoHolderError,
    PadError,
    PeerLostError,
    PeerRefusedError,
    PhalanxError,
    RefusedEvidenceError,
    ReleaseRefusedError,
    RollbackError,
    SealError,
    SignatureError,
    WrongProductError,
)
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.message import Count, Hex32, Size, SplitMessage, Text
from phalanx.split.channel.turn_messages import (
    AwaitedClients,
    ClientAppraised,
    ClientEvidenceRefused,
    ClientLeft,
    ClientReady,
    ClientRefused,
    ClientsReady,
    ClientTurn,
    Conclude,
    ConcludeReply,
    TurnDone,
    TurnTotal,
)
from phalanx.transport import bodies_by_kind, parse_body

_MOST_WORKERS = 2000


class EnclaveReady(SplitMessage):
    """The enclave listens."""

    kind: ClassVar[str] = "ready"
    address: Text


class EvidenceRequest(SplitMessage):
    """Evidence is asked for."""

    kind: ClassVar[str] = "challenge"
    nonce: Hex32


class _BothWays(SplitMessage):
    """A message with a field for appraisals of both sides; it is left out where only the enclave is appraised."""

    @model_serializer(mode="wrap")
    def _serialize_both_ways(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value or name not in ("nonce", "evidence_bytes")}


class EvidenceReply(_BothWays):
    """The evidence, as payload."""

    kind: ClassVar[str] = "proof"
    nonce: Hex32 | None = None
    """For the evidence of the party that has asked; None where none is needed."""


class HandshakeCall(_BothWays):
    """Payload: a token of so many bytes, the caller's own evidence, and the hello of a handshake.

    Evidence is empty where the enclave asks for none, and all three are in a plaintext split.
    """

    kind: ClassVar[str] = "call"
    token_bytes: Count
    evidence_bytes: Count = 0


class ClientEvidence(SplitMessage):
    """New evidence of a client for the nonce that it was given last, as payload; the keys stay."""

    kind: ClassVar[str] = "client_proof"


class ClientEvidenceReply(SplitMessage):
    """Word that the new evidence passes."""

    kind: ClassVar[str] = "client_proof_passes"


class Welcome(SplitMessage):
    """The reply to a hello, as payload; from now on the link is there."""

    kind: ClassVar[str] = "welcome"


class Upload(SplitMessage):
    """A frame of a microbatch, as payload."""

    kind: ClassVar[str] = "upload"
    what: Literal["train", "held_out"]
    microbatch: Count
    rows: Count
    attempt: Count = 0
    """How often the client was asked to send again before this."""


class ResendRequest(SplitMessage):
    """A frame was refused and nothing has changed: send again from there on, the same bytes."""

    kind: ClassVar[str] = "again"
    taken: Count
    """Frames that were taken from this client since it met the enclave."""
    attempt: Count
    """The number of this request for the same frames, from 1."""


class Reply(SplitMessage):
    """Feedback on a client's microbatches, a frame, as payload."""

    kind: ClassVar[str] = "reply"
    what: Literal["train", "held_out"]
    costs: Costs
    """CPU seconds of the enclave so far."""


class RepeatRequest(SplitMessage):
    """The last reply did not open: send it again, the same bytes."""

    kind: ClassVar[str] = "repeat"


class RestoreRequest(SplitMessage):
    """A sealed state, as payload: go on from it."""

    kind: ClassVar[str] = "restore"
    step: Count


class RestoreReply(SplitMessage):
    """Word that a state was restored; or, without a state, that training begins."""

    kind: ClassVar[str] = "restored"
    step: Count


class StateRequest(SplitMessage):
    """A request for the sealed state."""

    kind: ClassVar[str] = "keep"


class SealedState(SplitMessage):
    """The sealed state, as payload."""

    kind: ClassVar[str] = "kept"
    step: Count
    number: Count


class SettleRequest(SplitMessage):
    """Word that a sealed state is safe on the disk: every one before it is void."""

    kind: ClassVar[str] = "settle"
    number: Count


class SettleReply(SplitMessage):
    """Older ones are void."""

    kind: ClassVar[str] = "settled"


class WeightsRequest(SplitMessage):
    """A request for the digest of the final weights."""

    kind: ClassVar[str] = "weigh"


class WeightsReply(SplitMessage):
    """SHA-256 over all parameters of the model by name, adapters included."""

    kind: ClassVar[str] = "weighed"
    digest: Hex32


class AdaptersRequest(SplitMessage):
    """The adapters are asked for."""

    kind: ClassVar[str] = "ask_release"


class ReleasePart(SplitMessage):
    """One released parameter, a frame, as payload."""

    kind: ClassVar[str] = "part"
    name: Text
    shape: tuple[Count, ...] = Field(max_length=8)


class ReleaseFacts(StrictModel):
    """Under which conditions adapters were let out."""

    number: Count
    num_clients: Count
    clip_norm: Size
    noise_std: Size


class ReleaseEnd(SplitMessage):
    """All parts were sent."""

    kind: ClassVar[str] = "released"
    parts: Count
    release: ReleaseFacts


class StatementRequest(SplitMessage):
    """Ask for the enclave's statement about the frames that have crossed."""

    kind: ClassVar[str] = "ask_statement"


class StatementReply(SplitMessage):
    """The signed statement, as payload."""

    kind: ClassVar[str] = "stated"


class WorkersWanted(SplitMessage):
    """A request for workers of middle stages; they find the owner of the pipeline at the address."""

    kind: ClassVar[str] = "workers_wanted"
    names: tuple[Text, ...] = Field(max_length=_MOST_WORKERS)
    address: Text


class WorkerDismissed(SplitMessage):
    """Word that a worker takes part no more."""

    kind: ClassVar[str] = "worker_dismissed"
    name: Text


class GuardEvent(SplitMessage):
    """Word of one event of the guard of middle stages, as the enclave's own log has it."""

    kind: ClassVar[str] = "guard_event"
    event: Text
    facts: dict[str, Any]


class GuardedStep(SplitMessage):
    """The guard's report of a step, taken or failed."""

    kind: ClassVar[str] = "guarded_step"
    attempts: Count
    num_audits: Count
    num_alarms: Count
    verdicts: tuple[Verdict, ...]
    steps_redone: Count


class RefusedRequest(SplitMessage):
    """A refusal of a request; nothing has changed."""

    kind: ClassVar[str] = "refused"
    error: Text
    reason: Text
    detail: Text


class End(SplitMessage):
    """The session is over."""

    kind: ClassVar[str] = "end"


_KINDS = bodies_by_kind(
    (
        EnclaveReady,
        EvidenceRequest,
        EvidenceReply,
        HandshakeCall,
        ClientEvidence,
        ClientEvidenceReply,
        Welcome,
        Upload,
        ResendRequest,
        Reply,
        RepeatRequest,
        RestoreRequest,
        RestoreReply,
        StateRequest,
        SealedState,
        SettleRequest,
        SettleReply,
        WeightsRequest,
        WeightsReply,
        AdaptersRequest,
        ReleasePart,
        ReleaseEnd,
        StatementRequest,
        StatementReply,
        WorkersWanted,
        WorkerDismissed,
        GuardEvent,
        GuardedStep,
        ClientReady,
        ClientsReady,
        ClientTurn,
        TurnDone,
        TurnTotal,
        AwaitedClients,
        ClientLeft,
        ClientRefused,
        ClientAppraised,
        ClientEvidenceRefused,
        Conclude,
        ConcludeReply,
        RefusedRequest,
        End,
    )
)
_WITH_REASON: dict[str, type[SealError | RefusedEvidenceError | ReleaseRefusedError]] = {
    error.__name__: error for error in (SealError, RefusedEvidenceError, ReleaseRefusedError)
}
_WITHOUT: dict[str, type[PhalanxError]] = {
    error.__name__: error
    for error in (
        CheckpointError,
        DataError,
        FixedPointError,
        FrameError,
        NoHolderError,
        PadError,
        PeerLostError,
        PeerRefusedError,
        RollbackError,
        SignatureError,
        WrongProductError,
    )
}


def parse_message(kind: str, body: dict[str, Any]) -> SplitMessage:
    """Read a frame's body.

    Raises:
        FrameError: It is of no known kind, or malformed.
    """
    return parse_body(_KINDS, kind, body)


def refusal_of(error: PhalanxError) -> RefusedRequest:
    """Put an error into words that another process can raise again."""
    name, reason = type(error).__name__, getattr(error, "reason", "")
    detail = getattr(error, "detail", "") or str(error)
    return RefusedRequest(error=name, reason=str(reason)[:500], detail=detail[:500])


def error_of(refused: RefusedRequest, where: str) -> PhalanxError:
    """The error that a refusal puts into words."""
    detail = f"{where}: {refused.detail}"
    if refused.error in _WITH_REASON:
        return _WITH_REASON[refused.error](refused.reason, detail)
    return _WITHOUT.get(refused.error, FrameError)(detail)
