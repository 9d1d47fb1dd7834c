"""A conversation between owner and site that an engine carries: frames signed at both ends, each bound to one before.

    owner > site   greet    number 0, after the link's genesis
    site > owner   here     number 0, after the greeting; holds a random word
    owner > site   orders   number 1, 2, ..., the first one after ``here``, each later one after the order before
    site > owner   replies  the number of their order, after that order

The engine can read frames, withhold them or end a conversation, and nothing else: an altered, repeated or reordered
frame, or one of another run, session, site or life of a process, does not name the due frame as its predecessor.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from phalanx.errors import FrameError, OrderError, PeerRefusedError
from phalanx.federated.carriers.carrier import Payload
from phalanx.federated.config import OWNER
from phalanx.security.crypto import Identity, Peer, digest_hex
from phalanx.transport import (
    Body,
    Frame,
    HeaderFields,
    SignedHeader,
    TransportConfig,
    check_payload,
    encode_frame,
    parse_body,
    parse_frame,
    sign_header,
)
from phalanx.transport.frame import frame_size, genesis_digest


class SiteGreeting(Body, kind="greet"):
    """The owner asks whether a site is there."""


class SiteHere(Body, kind="here"):
    """A site is there, and this word was never said before: what follows on it is no replay."""

    word: Annotated[str, Field(pattern=r"^[0-9a-f]{32}\z")]


class SiteLeft(Body, kind="left"):
    """A site has heard that the run is over."""


@dataclass(frozen=True)
class FrameSigner:
    """One end of a conversation."""

    identity: Identity
    peer: Peer
    limits: TransportConfig

    def sign_frame(
        self, place: tuple[str, int, str], kind: str, body: Body, payload: Payload = b""
    ) -> tuple[SignedHeader, bytes]:
        """Sign one frame.

        Args:
            place: Run, number, and digest of the header before it.
        """
        parts: Sequence[bytes | memoryview] = (memoryview(payload).cast("B"),)
        run, sequence, previous = place
        size, digest = memoryview(payload).nbytes, digest_hex(*parts)
        fields = HeaderFields(
            run,
            kind,
            self.identity.name,
            self.peer.name,
            sequence,
            previous,
            size,
            digest,
            body.model_dump(mode="json"),
        )
        header = sign_header(self.identity, fields)
        if frame_size(header) > self.limits.max_frame_bytes:
            raise FrameError(
                f"frame for {self.peer.name}: has {frame_size(header)} bytes, at most "
                f"{self.limits.max_frame_bytes} are allowed; raise federated.transport.max_frame_bytes"
            )
        return header, encode_frame(header, parts)

    def check_frame(self, raw: bytes, place: tuple[str, int, str]) -> Frame:
        """Check one frame of the other end."""
        frame = parse_frame(raw, self.limits)
        fields = frame.header.fields
        if (fields.sender, fields.receiver, fields.run) != (self.peer.name, self.identity.name, place[0]):
            raise PeerRefusedError(f"{self.peer.name}: its frame belongs to another party or session")
        if (fields.sequence, fields.previous) != place[1:]:
            raise OrderError(f"{self.peer.name}: frame {fields.sequence} is out of sequence")
        frame.header.verify_sender(self.peer)
        check_payload(frame)
        return frame


class OwnerConversation:
    """The owner's end of a conversation with one site."""

    def __init__(self, speaker: FrameSigner, run: str) -> None:
        self._speaker, self._run = speaker, run
        self._last: tuple[int, str] | None = None

    @property
    def is_met(self) -> bool:
        """Whether the site has said that it is there."""
        return self._last is not None

    def end_conversation(self) -> None:
        """Say nothing more in it; only a greeting begins anew."""
        self._last = None

    def sign_greeting(self) -> tuple[SignedHeader, bytes]:
        """Begin the conversation anew."""
        self.end_conversation()
        start = genesis_digest(self._run, self._speaker.identity.name, self._speaker.peer.name)
        return self._speaker.sign_frame((self._run, 0, start), SiteGreeting.kind, SiteGreeting())

    def sign_order(self, kind: str, body: Body, payload: Payload) -> tuple[SignedHeader, bytes]:
        """Sign the next order."""
        if self._last is None:
            raise PeerRefusedError(f"{self._speaker.peer.name}: did not answer the greeting")
        number, previous = self._last
        header, raw = self._speaker.sign_frame((self._run, number + 1, previous), kind, body, payload)
        self._last = number + 1, header.header_digest
        return header, raw

    def receive_answer(self, raw: bytes, asked: SignedHeader) -> Frame:
        """Return a site's answer to an order."""
        frame = self._speaker.check_frame(raw, (self._run, asked.fields.sequence, asked.header_digest))
        if asked.fields.kind == SiteGreeting.kind:
            parse_body({SiteHere.kind: SiteHere}, frame.header.fields.kind, frame.header.fields.body)
            self._last = 0, frame.header.header_digest
        return frame


class SiteConversation:
    """A site's end of its conversation with the owner.

    Args:
        session: Beginning of the names of its run's sessions.
    """

    def __init__(self, speaker: FrameSigner, session: str) -> None:
        self._speaker, self._session = speaker, session
        self._due: tuple[str, int, str] | None = None
        self._answered: tuple[str, bytes] | None = None

    @property
    def max_frame_bytes(self) -> int:
        """Of a frame."""
        return self._speaker.limits.max_frame_bytes

    def repeated_answer(self, raw: bytes) -> bytes | None:
        """Return the answer to this very frame, where it is the last one over again; nothing is done twice."""
        digest = parse_frame(raw, self._speaker.limits).header.header_digest
        return self._answered[1] if self._answered is not None and self._answered[0] == digest else None

    def receive_order(self, raw: bytes) -> Frame:
        """Return the owner's next order, or a greeting that begins anew."""
        fields = parse_frame(raw, self._speaker.limits).header.fields
        if fields.kind == SiteGreeting.kind:
            if not fields.run.startswith(self._session):
                raise PeerRefusedError(
                    f"{OWNER}: sent a greeting for run {fields.run[:20]}, but this site agreed to {self._session[:20]}"
                )
            start = genesis_digest(fields.run, self._speaker.peer.name, self._speaker.identity.name)
            return self._speaker.check_frame(raw, (fields.run, 0, start))
        if self._due is None:
            raise OrderError(f"{OWNER}: sent no greeting to this process")
        return self._speaker.check_frame(raw, self._due)

    def sign_reply(self, heard: Frame, kind: str, body: Body, payload: Payload = b"") -> bytes:
        """Sign the answer to a frame; the next order is to follow both."""
        fields = heard.header.fields
        header, raw = self._speaker.sign_frame(
            (fields.run, fields.sequence, heard.header.header_digest), kind, body, payload
        )
        is_greeting = fields.kind == SiteGreeting.kind
        self._due = fields.run, fields.sequence + 1, header.header_digest if is_greeting else heard.header.header_digest
        self._answered = heard.header.header_digest, raw
        return raw

    def sign_welcome(self, heard: Frame) -> bytes:
        """Answer a greeting."""
        return self.sign_reply(heard, SiteHere.kind, SiteHere(word=secrets.token_hex(16)))
