"""Signed headers that one party passes on from another: opened here, bound to their session, or refused."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from phalanx.errors import FrameError, PeerRefusedError, SignatureError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.message import Message
from phalanx.pipeline.protocol.messages import (
    Apply,
    Audit,
    AuditReport,
    Commit,
    GradientHeld,
    PassedOnHeader,
    Ready,
    StepAudited,
    UpdateReport,
    parse_message,
)
from phalanx.security.audit import PublicHead
from phalanx.security.crypto import Peer
from phalanx.transport import SignedHeader

Link = tuple[str | None, str | None]
"""(sender, receiver) that a header may have; None stands for any party that the header names."""

_Said = TypeVar("_Said", bound=Message)


@dataclass(frozen=True)
class Statement(Generic[_Said]):
    """A statement that one party of this session signed and sent to another one.

    Attributes:
        header: The header that says so, for evidence.
    """

    message: _Said
    header: SignedHeader

    @property
    def payload_digest(self) -> str:
        """Digest of the payload that was sent with it."""
        return self.header.fields.payload_digest

    @property
    def size_bytes(self) -> int:
        """Bytes of that payload."""
        return self.header.fields.payload_size


class StatementReader:
    """A reader of passed-on headers, bound to one session of one run.

    Steps, epochs and microbatches have the same numbers in every session, and certificates outlive sessions. So a
    header counts only in the session that it names, from a sender that may have sent it to a receiver that may have
    got it.

    Args:
        session: The `run` that all headers of the session name.
        peer: Key of a party of the session; raises `PeerRefusedError` for any other name.

    Guarantees:
        What `open` returns was signed in this session, in this epoch, by the party and for the receiver that `link`
        names, and is of the kind and about the place that were asked for.
    """

    def __init__(self, session: str, peer: Callable[[str], Peer]) -> None:
        self.session = session
        self._peer = peer

    def open_statement(
        self,
        signed: PassedOnHeader,
        kind: type[_Said],
        epoch: int,
        place: Mapping[str, object],
        link: Callable[[_Said], Link | None],
    ) -> Statement[_Said]:
        """Read a header as a message of this session.

        Args:
            place: Values that fields of the message must have.
            link: Returns the sender and the receiver that the message may have; None when there is no such link.

        Raises:
            FrameError: It is malformed, of another session, receiver, sender, kind, epoch or place.
        """
        header = _header_of(signed)
        fields = header.fields
        message = parse_message(fields.kind, fields.body)
        if not isinstance(message, kind):
            raise FrameError(f"a passed-on header has kind {fields.kind!r}, expected {kind.kind!r}")
        expected = {"epoch": epoch, **place}
        actual = {name: getattr(message, name) for name in expected}
        if actual != expected:
            raise FrameError(f"a passed-on header is about {actual}, expected {expected}")
        allowed = link(message)
        if allowed is None:
            raise FrameError("a passed-on header belongs to no link of this assignment")
        self._check_link(header, allowed)
        return Statement(message, header)

    def open_frame_header(self, signed: PassedOnHeader, link: Link) -> SignedHeader:
        """Read the header of a frame that another party relays; its receiver reads its body as any frame's."""
        header = _header_of(signed)
        self._check_link(header, link)
        return header

    def open_log_head(self, found: PublicHead) -> PublicHead:
        """Read a head of the run's audit log, which outlives sessions: any of the same run may have told it."""
        if found.run != run_of_session(self.session):
            raise FrameError(
                f"a head of an audit log belongs to run {found.run!r}, expected {run_of_session(self.session)!r}"
            )
        found.check_owner_signature(self._peer(OWNER))
        return found

    def _check_link(self, header: SignedHeader, link: Link) -> None:
        fields, (sender, receiver) = header.fields, link
        if fields.run != self.session:
            raise FrameError(f"a passed-on header of {fields.sender} belongs to another session: {fields.run!r}")
        if sender not in (None, fields.sender) or receiver not in (None, fields.receiver):
            raise FrameError(
                f"a passed-on header is from {fields.sender} to {fields.receiver}, "
                f"expected from {sender or 'any party'} to {receiver or 'any party'}"
            )
        try:
            peer = self._peer(fields.sender)
        except PeerRefusedError as exc:
            raise SignatureError(
                f"a passed-on header names {fields.sender} as its sender, which is not in the run"
            ) from exc
        header.verify_sender(peer)


STATE = "state"
"""Kind of a statement about a state, whichever message it came in."""


WHOLE_MODEL = -1
"""The stage of a statement about all of them."""


class StatementKey(NamedTuple):
    """The identity of a statement within a session; two different statements of one identity are equivocation.

    Attributes:
        kind: Kind of the message, or `STATE`.
        author: Name of the party; it stands for its certificate and its incarnation.
        step: That it is about; of a state, the optimizer steps that it has taken.
        microbatch: -1 where it is about the whole step.
        order: Number of the owner's audit order that it answers; -1 where it answers none.
    """

    kind: str
    author: str
    epoch: int
    step: int
    stage: int
    microbatch: int = -1
    order: int = -1


def statements_in(author: str, message: Message) -> list[tuple[StatementKey, object]]:
    """Return a message's statements that verdicts may rest on, by identity: none for most kinds."""
    match message:
        case UpdateReport() | Ready():
            return [
                (StatementKey(STATE, author, message.epoch, state.step, int(name)), state)
                for name, state in message.states.items()
            ]
        case Commit() | GradientHeld() | StepAudited() | Audit() | AuditReport():
            place = (author, message.epoch, message.step, message.stage)
            microbatch = message.microbatch if isinstance(message, AuditReport) else -1
            order = -1 if isinstance(message, Commit | GradientHeld) else message.order
            return [(StatementKey(message.kind, *place, microbatch, order), message)]
        case Apply():
            place = (author, message.epoch, message.step, WHOLE_MODEL)
            return [(StatementKey(message.kind, *place), message.clip_coefficient)]
    return []


def run_of_session(session: str) -> str:
    """The run that a session belongs to: its name begins with the run's, see `session_name`."""
    return session.partition("-")[0]


def to_signed(header: SignedHeader) -> PassedOnHeader:
    """Write a header as JSON text; nothing is re-encoded, so its signature still holds."""
    return PassedOnHeader(header=header.header_bytes.decode(), signature=header.signature.hex())


def _header_of(signed: PassedOnHeader) -> SignedHeader:
    """Take a header out of its message; neither its fields nor its signature are looked at."""
    try:
        return SignedHeader(signed.header.encode(), bytes.fromhex(signed.signature))
    except ValueError as exc:
        raise FrameError(f"a passed-on header is malformed: {exc}") from exc
