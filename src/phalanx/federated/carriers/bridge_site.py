"""A site's end of the bridge: a local socket, where an engine's client delivers frames and takes answers."""

import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.config import printable_text
from phalanx.errors import FrameError, TransportError, VerificationError
from phalanx.federated.carriers import messages as m
from phalanx.federated.carriers.carrier import SiteAnswers
from phalanx.federated.carriers.conversation import FrameSigner, SiteConversation, SiteGreeting, SiteLeft
from phalanx.federated.carriers.shim import (
    ANSWER,
    LOST,
    ORDER,
    ShimMessage,
    SocketLostError,
    listen_at,
    read_message,
    write_message,
)
from phalanx.federated.config import OWNER
from phalanx.security.crypto import Identity, Peer
from phalanx.transport import TransportConfig, parse_body

_BEGIN_S = 10.0
"""Seconds until a connected client must begin."""
_MAX_WORDS = 300
Say = Callable[[str], None]


@dataclass(frozen=True)
class BridgedSite:
    """A site, and where an engine's client finds it."""

    identity: Identity
    owner: Peer
    socket: Path
    session: str
    limits: TransportConfig


def serve_bridge(site: BridgedSite, answer: SiteAnswers, say: Say) -> None:
    """Answer frames, one at a time, until the owner says that the run is over."""
    try:
        server = listen_at(str(site.socket))
    except SocketLostError as exc:
        raise TransportError(str(exc)).with_facts(code="PHX-T002", found=str(site.socket)) from exc
    heard = SiteConversation(FrameSigner(site.identity, site.owner, site.limits), site.session)
    with contextlib.closing(server):
        say(f"{site.identity.name}: listens on {site.socket}")
        is_over = False
        while not is_over:
            connection, _ = server.accept()
            with contextlib.closing(connection):
                is_over = _serve_frame(connection, heard, answer, say)
    with contextlib.suppress(OSError):
        site.socket.unlink()


def _serve_frame(line: socket.socket, heard: SiteConversation, answer: SiteAnswers, say: Say) -> bool:
    """Take one frame and answer it; return whether the run is over."""
    is_over = False
    try:
        message = read_message(line, heard.max_frame_bytes, _BEGIN_S)
        if message is None or message.kind != ORDER:
            say("an engine's client connected but delivers no frame")
            return False
        try:
            raw, is_over = _answer_frame(message.data, heard, answer, say)
            reply = ShimMessage(ANSWER, message.number, data=raw)
        except (TransportError, VerificationError) as exc:
            reason = printable_text(str(exc), _MAX_WORDS)
            say(f"refused a frame: {reason}")
            reply = ShimMessage(LOST, message.number, data=f"refused: {reason}".encode())
        write_message(line, reply)
    except SocketLostError as exc:
        # what was answered is kept, for the same frame when it is delivered again
        say(f"an engine's client disconnected: {exc}")
    return is_over


def _answer_frame(raw: bytes, heard: SiteConversation, answer: SiteAnswers, say: Say) -> tuple[bytes, bool]:
    """Return the frame that answers this one, and whether the run is over."""
    before = heard.repeated_answer(raw)
    if before is not None:
        return before, False
    frame = heard.receive_order(raw)
    fields = frame.header.fields
    if fields.kind == SiteGreeting.kind:
        say(f"{OWNER} sent its greeting, in session {fields.run[-16:]}")
        return heard.sign_welcome(frame), False
    order = parse_body(m.ORDERS, fields.kind, fields.body)
    if isinstance(order, m.EndOrder):
        return heard.sign_reply(frame, SiteLeft.kind, SiteLeft()), True
    reply, payload = answer(order, frame.payload)
    try:
        return heard.sign_reply(frame, reply.kind, reply, payload), False
    except FrameError:
        fault = m.SiteFault(ticket=order.ticket, reason="failed")
        return heard.sign_reply(frame, fault.kind, fault), False
