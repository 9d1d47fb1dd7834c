"""The bodies of all frames between the parties of a verified pipeline, each parsed once and strictly."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from phalanx.config import StrictModel
from phalanx.config.strict import later_key
from phalanx.pipeline.config import MAX_STAGES
from phalanx.pipeline.protocol.greetings import Challenge, ChallengeReply, Hello, Leave, NotLetIn, PreparedNotice, Setup
from phalanx.pipeline.protocol.message import (
    MAX_HEADERS,
    MAX_PARTIES,
    MAX_PLACES,
    Address,
    Digest,
    GradientDigest,
    Header,
    Label,
    Message,
    Microbatch,
    NormSquared,
    OrderNumber,
    PartyName,
    Pem,
    RequestNumber,
    Seconds,
    Share,
    Size,
    Stage,
    StageName,
    Step,
    WeightsDigest,
    Words,
)
from phalanx.pipeline.tolerance.screen import Doubt
from phalanx.planner.schedules import Direction
from phalanx.security.audit import PublicHead
from phalanx.telemetry import known_cost
from phalanx.transport import bodies_by_kind, parse_body

Purpose = Literal["state", "weights", "undo", "gradient", "audited", "snapshot", "duplicate", "kept"]
"""`audited`: a weight gradient as an auditor has recomputed it; `snapshot`: trained weights with their moments, to go
back to; `duplicate`: the same, for the owner's checkpoint; `kept`: the same, as a worker has it on disk from an earlier
session of the run."""


MessageKey = tuple[int, Direction, int]
"""(source stage, direction, microbatch) of a tensor between stages."""

NO_FIELDS: Mapping[str, object] = {}

# not `Self`, which the checks of types in tests do not know in a class method
_Tensor = TypeVar("_Tensor", bound="TensorMessage")


def target_of(key: MessageKey) -> int:
    """Return the stage that a tensor is sent to."""
    return key[0] + (1 if key[1] == "forward" else -1)


class StepMessage(Message):
    """A message about one optimizer step, counted from 0."""

    step: Step


class StageMessage(StepMessage):
    """A message about one stage in one step."""

    stage: Stage


class TensorMessage(StepMessage):
    """A message about one tensor between stages: an activation (forward) or its gradient (backward)."""

    microbatch: Microbatch
    direction: Direction
    source: Stage
    """The stage that sent it."""

    @classmethod
    def about_key(
        cls: type[_Tensor], epoch: int, step: int, key: MessageKey, more: Mapping[str, object] = NO_FIELDS
    ) -> _Tensor:
        """Make a message about this tensor; `more` has the fields of its kind."""
        source, direction, microbatch = key
        place = {"epoch": epoch, "step": step, "microbatch": microbatch, "direction": direction, "source": source}
        return cls.model_validate({**place, **more})

    @property
    def key(self) -> MessageKey:
        """Which tensor of its step it is about."""
        return self.source, self.direction, self.microbatch

    @property
    def tensor_place(self) -> dict[str, object]:
        """Which tensor of its epoch it is about, by the names of the fields."""
        return {name: getattr(self, name) for name in ("step", "microbatch", "direction", "source")}


class Role(StrictModel):
    """The parties of one stage: its holder, its shadows, and the sender of its state to parties that are new to it."""

    stage: Stage
    holder: PartyName
    shadow: PartyName | None
    second_shadow: PartyName | None = later_key(None)
    source: PartyName
    newcomers: tuple[PartyName, ...] = Field(max_length=MAX_PARTIES)


class Assign(StepMessage, kind="assign"):
    """A new epoch: abandon the work in flight, take these roles, be ready for this step."""

    roles: tuple[Role, ...] = Field(max_length=MAX_STAGES)
    addresses: dict[PartyName, Address] = Field(max_length=MAX_PARTIES)
    certificates: dict[PartyName, Pem] = Field(max_length=MAX_PARTIES)
    log_head: PublicHead | None = None


class NoiseKeys(Message, kind="noise_keys"):
    """The keys of the noise that hides single rows, of stages that a party holds or shadows in this epoch.

    The payload is the keys, one behind the other, and the only place where they cross: headers are kept as evidence.
    """

    stages: tuple[Stage, ...] = Field(max_length=MAX_STAGES)


class StateDigest(StrictModel):
    """Digests of one copy of a stage after `step` optimizer steps."""

    step: Step
    weights: WeightsDigest
    moments: Digest


class Ready(Message, kind="ready"):
    """All roles of this epoch are taken; the states that this party now has, by stage."""

    states: dict[StageName, StateDigest] = Field(max_length=MAX_STAGES)


class Activation(TensorMessage, kind="tensor"):
    """A tensor between neighbouring stages; the payload is its bytes."""

    target: Stage
    dtype: Label
    shape: tuple[Size, ...] = Field(max_length=16)


class Bulk(StageMessage, kind="bulk"):
    """One part of a stage's state or gradient."""

    purpose: Purpose
    offset: Size
    total: Size
    request: RequestNumber = 0
    """The owner's request that this answers; 0 for what nobody asked for."""


class PassedOnHeader(StrictModel):
    """A signed header as it was received, kept as evidence."""

    header: Header
    signature: Annotated[str, Field(max_length=256)]


class SentDigest(StrictModel):
    """The digest of a tensor that a stage says it sent."""

    direction: Direction
    microbatch: Microbatch
    digest: Digest


def _without_repetition(sent: tuple[SentDigest, ...]) -> tuple[SentDigest, ...]:
    """Refuse two digests for one message: a commitment says one thing about each."""
    if len({(item.direction, item.microbatch) for item in sent}) < len(sent):
        raise PydanticCustomError("repeated", "names one message twice")
    return sent


class Commit(StageMessage, kind="commit"):
    """A stage's commitment to a whole step: its inputs, its outputs, its weight gradient."""

    received: tuple[PassedOnHeader, ...] = Field(max_length=MAX_HEADERS)
    sent: Annotated[tuple[SentDigest, ...], Field(max_length=MAX_HEADERS), AfterValidator(_without_repetition)]
    norm_squared: NormSquared | None
    """Of the weight gradient; None when it is not finite."""
    gradient: GradientDigest


class GradientHeld(StageMessage, kind="gradient_held"):
    """A shadow has the weight gradient of a stage, received or recomputed."""

    norm_squared: NormSquared | None
    gradient: GradientDigest
    parts: tuple[PassedOnHeader, ...] = Field(max_length=MAX_HEADERS)
    """Headers under which the holder sent it; empty when it was recomputed."""


class Audit(StageMessage, kind="audit"):
    """The owner asks an auditor to recompute microbatches of a stage; it is not told what to find."""

    microbatches: tuple[Microbatch, ...] = Field(max_length=MAX_PLACES)
    directions: tuple[Direction, ...] = Field(max_length=2)
    order: OrderNumber
    """Counts the orders of a session; a report names the order that it answers."""
    urgent: bool
    weights: bool = False
    """Recompute the weight gradient as well; the microbatches are then all of the step's."""


class StepAudited(StageMessage, kind="step_audited"):
    """An auditor has recomputed a stage's weight gradient from all committed inputs of the step."""

    order: OrderNumber
    norm_squared: NormSquared | None
    gradient: GradientDigest


class AuditReport(StageMessage, kind="audit_report"):
    """An auditor's commitment to its own recomputed tensors."""

    microbatch: Microbatch
    inputs: tuple[PassedOnHeader, ...] = Field(max_length=2)
    """Headers of the messages that were recomputed from, as their senders signed them."""
    digests: dict[Direction, Digest]
    order: OrderNumber
    """Of the `Audit` that asked for it."""
    doubt: Doubt | None = None
    """With the last report of a step: why the weight gradient that the stage sent looks odd; it convicts no party."""


class Fetch(TensorMessage, kind="fetch"):
    """Ask for the bytes of a tensor: one that was sent (`claim` false) or an auditor's own (`claim` true)."""

    claim: bool
    request: RequestNumber = 0
    """Counts the owner's requests of a session; the answer names it. 0 where an auditor asks."""

    @classmethod
    def from_key(cls, epoch: int, step: int, key: MessageKey, *, claim: bool = False) -> "Fetch":
        """Ask for a tensor."""
        return cls.about_key(epoch, step, key, {"claim": claim})


class FetchReply(TensorMessage, kind="fetched"):
    """The answer to `Fetch`; its payload counts by its digest, whichever party sent it."""

    claim: bool
    evidence: PassedOnHeader | None
    """The header under which the tensor was sent; None for a claim."""
    request: RequestNumber = 0
    """As in `Fetch`."""


class FetchBulk(StageMessage, kind="fetch_bulk"):
    """The owner asks for a stage's state, weights, undo copy or gradient."""

    purpose: Purpose
    request: RequestNumber = 0
    """As in `Fetch`."""


class Relay(TensorMessage, kind="relay"):
    """The owner hands on a tensor that did not reach its receiver; it counts by its sender's header."""

    evidence: PassedOnHeader


class Ask(StepMessage, kind="ask"):
    """Nothing has come for long: the owner asks a party how far it is."""


class Place(StrictModel):
    """A tensor of the present step, as seen from one stage."""

    direction: Direction
    microbatch: Microbatch


class Progress(StrictModel):
    """The progress of one stage: its received and sent tensors of this step."""

    received: tuple[Place, ...] = Field(max_length=MAX_PLACES)
    sent: tuple[Place, ...] = Field(max_length=MAX_PLACES)


class ProgressReport(StepMessage, kind="standing"):
    """The answer to `Ask`."""

    stages: dict[StageName, Progress] = Field(max_length=MAX_STAGES)
    gradients: tuple[Stage, ...] = Field(max_length=MAX_STAGES)
    """Shadowed stages for which the weight gradient of this step is here."""


class Apply(StepMessage, kind="apply"):
    """The step is verified: let the optimizer step."""

    clip_coefficient: Share
    log_head: PublicHead | None = None
    """As in `Setup`; it has the record of the step before."""


class UpdateReport(StepMessage, kind="applied"):
    """Digests of every copy after the optimizer step, and this party's running costs."""

    states: dict[StageName, StateDigest] = Field(max_length=MAX_STAGES)
    usage: dict[Annotated[str, AfterValidator(known_cost)], Seconds]
    bytes_sent: dict[PartyName, Size] = Field(max_length=MAX_PARTIES)


class ScreenHit(TensorMessage, kind="screen_hit"):
    """A received tensor looks odd; it is not used until an audit has cleared it."""

    reason: Words


class Release(TensorMessage, kind="release"):
    """An audit has cleared a screened tensor."""


class Fault(Message, kind="fault"):
    """A party tells the owner about a peer, a link or itself."""

    about: PartyName
    error: Label
    reason: Words
    evidence: PassedOnHeader | None = None


class Carry(Message, kind="carry"):
    """A frame of a failed link, by way of the owner; the payload is the frame's."""

    header: PassedOnHeader


class Detour(Message, kind="detour"):
    """The owner ends a link of this party: its messages to the receiver go by way of the owner."""

    receiver: PartyName


class Shutdown(Message, kind="shutdown"):
    """The run is over for this worker."""

    reason: Words
    log_head: PublicHead | None = None


_MESSAGES = bodies_by_kind(
    (
        *(Hello, Setup, Challenge, ChallengeReply, NotLetIn, PreparedNotice, Leave, Assign, NoiseKeys),
        Ready,
        *(Activation, Bulk, Commit, GradientHeld, Audit, AuditReport, StepAudited),
        *(Fetch, FetchReply, FetchBulk, Relay, Ask, ProgressReport, Apply, UpdateReport, ScreenHit, Release),
        *(Fault, Carry, Detour, Shutdown),
    )
)


def parse_message(kind: str, body: dict[str, Any]) -> Message:
    """Parse a frame's body.

    Raises:
        OutOfBoundsError: A value is one that nothing can have; its sender's signature convicts it.
        FrameError: The kind is unknown, or a field is missing, unknown or of the wrong type.
    """
    return parse_body(_MESSAGES, kind, body)
