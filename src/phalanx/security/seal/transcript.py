"""Transcripts of a channel: one hash chain per direction, and each side's signed statement on where both ended.

GCM's tags do not commit to a key: a party that has the key can make two frames with one tag. The chain is over a
collision-resistant digest of whole frames, so that a signed end stands for one sequence of frames only.
"""

import re
from dataclasses import dataclass
from typing import Any

from phalanx.config import canonical_json
from phalanx.errors import SignatureError, TranscriptError
from phalanx.security.crypto import DIGEST_PATTERN, Identity, Peer, digest_hex, in_domain, parse_canonical
from phalanx.security.seal.context import Context, Direction
from phalanx.security.seal.sender import Channel

_DOMAIN = "seal-statement/1"
_SIGNATURE = re.compile(r"[0-9a-f]{128}")


@dataclass(frozen=True)
class ChainHead:
    """The head of a chain."""

    num_frames: int
    digest: str

    def after_frame(self, frame_digest: str) -> "ChainHead":
        """Return the head after one more frame."""
        if DIGEST_PATTERN.fullmatch(frame_digest) is None:
            raise TranscriptError("transcript: a frame's digest is not 64 lowercase hex characters")
        link = bytes.fromhex(self.digest) + bytes.fromhex(frame_digest)
        return ChainHead(self.num_frames + 1, digest_hex(in_domain("seal-link/1", link)))


def first_head(context: Context, direction: Direction, epoch: int) -> ChainHead:
    """Return the head of a direction in which nothing has crossed yet."""
    associated = context.encoded + bytes([direction]) + epoch.to_bytes(4, "big")
    return ChainHead(0, digest_hex(in_domain("seal-transcript/1", associated)))


@dataclass(frozen=True)
class TranscriptStatement:
    """One side's signed statement about all frames of a channel."""

    party: str
    run: str
    session: str
    to_server: ChainHead
    to_client: ChainHead


class Transcript:
    """The transcript of one end of a channel."""

    def __init__(self, channel: Channel, identity: Identity) -> None:
        self._context, self._identity = channel.context, identity
        sends = Direction.TO_SERVER if identity.name == channel.context.terms.client else Direction.TO_CLIENT
        self._sends = sends
        self._heads = {
            direction: first_head(
                channel.context,
                direction,
                channel.sender.sender_epoch if direction is sends else channel.receiver.sender_epoch,
            )
            for direction in Direction
        }

    def note_sent(self, frame_digest: str) -> None:
        """Note a frame by its `digest_hex`, such as the payload digest of the transport's frame around it."""
        self._heads[self._sends] = self._heads[self._sends].after_frame(frame_digest)

    def note_received(self, frame_digest: str) -> None:
        """Note a frame that opened."""
        (other,) = set(Direction) - {self._sends}
        self._heads[other] = self._heads[other].after_frame(frame_digest)

    def direction_head(self, direction: Direction) -> ChainHead:
        """Return where a direction is now."""
        return self._heads[direction]

    def sign_transcript(self) -> bytes:
        """Return this side's statement about all frames so far."""
        body = {
            "party": self._identity.name,
            "run": self._context.terms.run,
            "session": self._context.session.hex(),
            "to_server": _head_to_json(self._heads[Direction.TO_SERVER]),
            "to_client": _head_to_json(self._heads[Direction.TO_CLIENT]),
        }
        signature = self._identity.sign_data(in_domain(_DOMAIN, canonical_json(body)))
        return canonical_json({"body": body, "signature": signature.hex()})


def read_statement(data: bytes, peer: Peer) -> TranscriptStatement:
    """Parse a statement and check its signature."""
    try:
        body, signature = _split_signed(parse_canonical(data))
        statement = _read_statement(body)
    except ValueError as exc:
        raise TranscriptError(f"statement: is malformed: {exc}") from exc
    if statement.party != peer.name:
        raise TranscriptError(f"statement: of {statement.party[:80]!r}, expected {peer.name}")
    try:
        peer.verify_signature(signature, in_domain(_DOMAIN, canonical_json(body)))
    except SignatureError as exc:
        raise SignatureError(f"statement of {peer.name}: the signature does not match") from exc
    return statement


def compare_statements(one: TranscriptStatement, other: TranscriptStatement) -> None:
    """Return when both sides saw the same frames, all of them.

    Raises:
        TranscriptError: They did not; says in which direction, and whether frames are missing or different.
    """
    if (one.run, one.session) != (other.run, other.session):
        raise TranscriptError("statements: are about two runs or sessions")
    for name in ("to_server", "to_client"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine.num_frames != theirs.num_frames:
            raise TranscriptError(
                f"frames {name}: {one.party} counts {mine.num_frames}, {other.party} {theirs.num_frames}; "
                "some were withheld"
            )
        if mine.digest != theirs.digest:
            raise TranscriptError(
                f"frames {name}: both count {mine.num_frames}, and not the same ones, or not in the same epochs"
            )


def _split_signed(whole: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    if whole.keys() != {"body", "signature"} or not isinstance(whole["body"], dict):
        raise ValueError("expected a body and a signature")
    if not isinstance(whole["signature"], str) or _SIGNATURE.fullmatch(whole["signature"]) is None:
        raise ValueError("the signature is not 128 lowercase hex characters")
    return whole["body"], bytes.fromhex(whole["signature"])


def _read_statement(body: dict[str, Any]) -> TranscriptStatement:
    if body.keys() != {"party", "run", "session", "to_server", "to_client"}:
        raise ValueError(f"its keys are {sorted(body)[:10]}")
    if not all(type(body[name]) is str for name in ("party", "run", "session")):
        raise ValueError("party, run or session is no text")
    heads = (_head_from_json(body["to_server"]), _head_from_json(body["to_client"]))
    return TranscriptStatement(body["party"], body["run"], body["session"], *heads)


def _head_to_json(head: ChainHead) -> dict[str, Any]:
    return {"num_frames": head.num_frames, "digest": head.digest}


def _head_from_json(value: Any) -> ChainHead:
    if not isinstance(value, dict) or value.keys() != {"num_frames", "digest"}:
        raise ValueError("a head is a number of frames and a digest")
    num_frames, head_digest = value["num_frames"], value["digest"]
    if type(num_frames) is not int or num_frames < 0:
        raise ValueError("a head's number of frames is no number")
    if not isinstance(head_digest, str) or DIGEST_PATTERN.fullmatch(head_digest) is None:
        raise ValueError("a head's digest is not 64 lowercase hex characters")
    return ChainHead(num_frames, head_digest)
