"""The messages beside the frames: their bodies between the enclave and its parties, read once, strictly.

Nothing in a body is believed for its own sake: a frame that is not what its body says does not open.
"""

from typing import Any, Literal

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

_MAX_WORKERS = 2000


class EnclaveReady(SplitMessage, kind="ready"):
    """The enclave listens."""

    address: Text


class EvidenceRequest(SplitMessage, kind="challenge"):
    """Evidence is asked for."""

    nonce: Hex32


class _BothWays(SplitMessage):
    """A message with a field for appraisals of both sides; it is left out where only the enclave is appraised."""

    @model_serializer(mode="wrap")
    def _serialize_both_ways(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value or name not in ("nonce", "evidence_bytes")}


class EvidenceReply(_BothWays, kind="proof"):
    """The evidence, as payload."""

    nonce: Hex32 | None = None
    """For the evidence of the party that has asked; None where none is needed."""


class HandshakeCall(_BothWays, kind="call"):
    """Payload: a token of so many bytes, the caller's own evidence, and the hello of a handshake.

    Evidence is empty where the enclave asks for none, and all three are in a plaintext split.
    """

    token_bytes: Count
    evidence_bytes: Count = 0


class ClientEvidence(SplitMessage, kind="client_proof"):
    """New evidence of a client for the nonce that it was given last, as payload; the keys stay."""


class ClientEvidenceReply(SplitMessage, kind="client_proof_passes"):
    """Word that the new evidence passes."""


class Welcome(SplitMessage, kind="welcome"):
    """The reply to a hello, as payload; from now on the link is there."""


class Upload(SplitMessage, kind="upload"):
    """A frame of a microbatch, as payload."""

    what: Literal["train", "held_out"]
    microbatch: Count
    rows: Count
    attempt: Count = 0
    """How often the client was asked to send again before this."""


class ResendRequest(SplitMessage, kind="again"):
    """A frame was refused and nothing has changed: send again from there on, the same bytes."""

    taken: Count
    """Frames that were taken from this client since it met the enclave."""
    attempt: Count
    """The number of this request for the same frames, from 1."""


class Reply(SplitMessage, kind="reply"):
    """Feedback on a client's microbatches, a frame, as payload."""

    what: Literal["train", "held_out"]
    costs: Costs
    """CPU seconds of the enclave so far."""


class RepeatRequest(SplitMessage, kind="repeat"):
    """The last reply did not open: send it again, the same bytes."""


class RestoreRequest(SplitMessage, kind="restore"):
    """A sealed state, as payload: go on from it."""

    step: Count


class RestoreReply(SplitMessage, kind="restored"):
    """Word that a state was restored; or, without a state, that training begins."""

    step: Count


class StateRequest(SplitMessage, kind="keep"):
    """A request for the sealed state."""


class SealedState(SplitMessage, kind="kept"):
    """The sealed state, as payload."""

    step: Count
    number: Count


class SettleRequest(SplitMessage, kind="settle"):
    """Word that a sealed state is safe on the disk: every one before it is void."""

    number: Count


class SettleReply(SplitMessage, kind="settled"):
    """Older ones are void."""


class WeightsRequest(SplitMessage, kind="weigh"):
    """A request for the digest of the final weights."""


class WeightsReply(SplitMessage, kind="weighed"):
    """SHA-256 over all parameters of the model by name, adapters included."""

    digest: Hex32


class PermitRequest(SplitMessage, kind="prepare_release"):
    """The adapters are to be let out: a release is permitted and counted, and nothing leaves yet."""


class AdaptersRequest(SplitMessage, kind="ask_release"):
    """The adapters of the release that is permitted are asked for."""


class ReleasePart(SplitMessage, kind="part"):
    """One released parameter, a frame, as payload."""

    name: Text
    shape: tuple[Count, ...] = Field(max_length=8)


class ReleaseFacts(StrictModel):
    """Under which conditions adapters were let out."""

    number: Count
    num_clients: Count
    clip_norm: Size
    noise_std: Size


class ReleaseReply(SplitMessage, kind="release_prepared"):
    """A release is permitted; its adapters leave once a state that counts it is kept."""

    is_kept: bool
    release: ReleaseFacts


class ReleaseEnd(SplitMessage, kind="released"):
    """All parts were sent."""

    parts: Count
    release: ReleaseFacts


class StatementRequest(SplitMessage, kind="ask_statement"):
    """Ask for the enclave's statement about the frames that have crossed."""


class StatementReply(SplitMessage, kind="stated"):
    """The signed statement, as payload."""


class WorkersWanted(SplitMessage, kind="workers_wanted"):
    """A request for workers of middle stages; they find the owner of the pipeline at the address."""

    names: tuple[Text, ...] = Field(max_length=_MAX_WORKERS)
    address: Text


class WorkerDismissed(SplitMessage, kind="worker_dismissed"):
    """Word that a worker takes part no more."""

    name: Text


class GuardEvent(SplitMessage, kind="guard_event"):
    """Word of one event of the guard of middle stages, as the enclave's own log has it."""

    event: Text
    facts: dict[str, Any]


class GuardedStep(SplitMessage, kind="guarded_step"):
    """The guard's report of a step, taken or failed."""

    attempts: Count
    num_audits: Count
    num_alarms: Count
    verdicts: tuple[Verdict, ...]
    steps_redone: Count


class RefusedRequest(SplitMessage, kind="refused"):
    """A refusal of a request; nothing has changed."""

    error: Text
    reason: Text
    detail: Text


class End(SplitMessage, kind="end"):
    """The session is over."""


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
        PermitRequest,
        AdaptersRequest,
        ReleaseReply,
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
    """Read a frame's body."""
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
