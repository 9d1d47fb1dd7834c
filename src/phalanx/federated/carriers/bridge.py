"""The owner's end of the bridge: a local socket, where an engine's server takes frames and hands in answers."""

import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.config import printable_text
from phalanx.errors import TransportError, VerificationError
from phalanx.federated.carriers.carrier import CarriedReply, LostSite, SentOrder
from phalanx.federated.carriers.conversation import FrameSigner, OwnerConversation, SiteGreeting, SiteLeft
from phalanx.federated.carriers.messages import EndOrder
from phalanx.federated.carriers.shim import (
    ANSWER,
    END,
    LOST,
    ORDER,
    REFUSED,
    SITES,
    ShimMessage,
    SocketLostError,
    listen_at,
    read_message,
    write_message,
)
from phalanx.security.crypto import Identity, Peer
from phalanx.transport import SignedHeader, TransportConfig

_LOOK_EVERY_S, _GREET_EVERY_S, _END_S = 0.5, 2.0, 5.0
_GREETING_S = 60.0
"""How long a site may take to answer a greeting. Who has taken its name at the engine answers none, or wrongly."""
_MAX_WAITING = 256
_MAX_WORDS = 300
Say = Callable[[str], None]


@dataclass
class _Delivery:
    """A frame that was handed to an engine, with its order."""

    site: str
    asked: SignedHeader


@dataclass
class _Contact:
    """The owner's contact with one site.

    Attributes:
        is_near: Whether the engine says that it can be reached.
        greeted: Time of the last greeting.
    """

    conversation: OwnerConversation
    is_near: bool = False
    greeted: float = field(default=float("-inf"))
    trouble: str = ""


@dataclass(frozen=True)
class OwnerSocket:
    """The socket at which an owner waits for an engine.

    Attributes:
        path: Socket to listen at; its directory is this user's alone.
        session: Name of the session; frames of another one are refused.
    """

    path: Path
    session: str
    limits: TransportConfig


class BridgeCarrier:
    """A `Carrier` over an engine that is not trusted: it gets signed frames and hands in signed answers.

    Args:
        say: Takes one line; called from the thread that listens as well.

    Guarantees:
        A reply is signed by the key of its site, and answers the last order to this very site. An engine that alters,
        repeats, swaps or makes up frames costs a site its round, and changes nothing else. It can read the payloads, if
        they are not masked by ``secure``.
    """

    def __init__(
        self,
        identity: Identity,
        post: OwnerSocket,
        roster: Mapping[str, Peer],
        revoked: Callable[[], Collection[str]],
        say: Say,
    ) -> None:
        self._limits, self._revoked, self._say, self.path = post.limits, revoked, say, post.path
        self._contacts = {
            name: _Contact(OwnerConversation(FrameSigner(identity, peer, post.limits), post.session))
            for name, peer in roster.items()
        }
        self._open: dict[int, _Delivery] = {}
        # guarded by the lock, for the thread that reads an engine: frames of which it has not seen an answer
        self._unanswered: set[int] = set()
        self._last_number = 0
        self._ready: deque[CarriedReply | LostSite] = deque()
        self._messages: queue.Queue[tuple[int, ShimMessage | None]] = queue.Queue(_MAX_WAITING)
        self._engine: tuple[int, socket.socket] | None = None
        self._engines = self._current_engine = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        try:
            self._server = listen_at(str(post.path))
        except SocketLostError as exc:
            raise TransportError(str(exc)).with_facts(code="PHX-T002", found=str(post.path)) from exc
        threading.Thread(target=self._await_engines, daemon=True).start()

    def present_sites(self) -> frozenset[str]:
        """As `Carrier` says; a site with a certificate that was revoked meanwhile is there no more."""
        self._process_messages()
        present = frozenset(name for name, contact in self._contacts.items() if contact.conversation.is_met)
        for site in present & set(self._revoked()):
            self._end_conversation(site, "revoked")
            self._report_trouble(site, "its certificate was revoked")
        return frozenset(name for name in present if self._contacts[name].conversation.is_met)

    def await_sites(self, least: int, timeout_s: float) -> frozenset[str]:
        """Wait until so many sites, or all sites that will be in time, are there; return them."""
        deadline = time.monotonic() + timeout_s
        while len(present := self.present_sites()) < least and time.monotonic() < deadline:
            self._wait_message(_LOOK_EVERY_S)
        return present

    def broadcast_orders(self, orders: Mapping[str, SentOrder]) -> None:
        """As `Carrier` says."""
        for site, sent in orders.items():
            try:
                asked, raw = self._contacts[site].conversation.sign_order(sent.order.kind, sent.order, sent.payload)
            except TransportError as exc:
                self._report_trouble(site, str(exc))
                is_gone = not self._contacts[site].conversation.is_met
                self._end_conversation(site, "gone" if is_gone else type(exc).__name__, is_asked=True)
                continue
            self._deliver_frame(site, asked, raw)

    def collect_reply(self, timeout_s: float) -> CarriedReply | LostSite | None:
        """As `Carrier` says."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._process_messages()
            if self._ready:
                return self._ready.popleft()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            self._wait_message(min(left_s, _LOOK_EVERY_S))

    def close(self) -> None:
        """Wait a moment until those have answered that were told of the end, and part from the engine."""
        deadline = time.monotonic() + _END_S
        while any(delivery.asked.fields.kind == EndOrder.kind for delivery in self._open.values()):
            if (left_s := deadline - time.monotonic()) <= 0:
                break
            self._wait_message(min(left_s, _LOOK_EVERY_S))
            self._drain_queue()
        self._closed.set()
        with self._lock:
            engine, self._engine = self._engine, None
        if engine is not None:
            with contextlib.suppress(SocketLostError):
                write_message(engine[1], ShimMessage(END))
            _close_socket(engine[1])
        _close_socket(self._server)
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _process_messages(self) -> None:
        """Process the engine's messages, and greet new sites that can be reached."""
        self._drain_queue()
        if self._engine is None:
            return
        now, revoked = time.monotonic(), None
        self._give_up_greetings(now)
        for site, contact in self._contacts.items():
            busy = any(delivery.site == site for delivery in self._open.values())
            if not contact.is_near or contact.conversation.is_met or busy or now - contact.greeted < _GREET_EVERY_S:
                continue
            revoked = self._revoked() if revoked is None else revoked
            if site in revoked:
                self._report_trouble(site, "its certificate was revoked")
                continue
            contact.greeted = now
            self._deliver_frame(site, *contact.conversation.sign_greeting())

    def _give_up_greetings(self, now: float) -> None:
        for number, delivery in list(self._open.items()):
            is_greeting = delivery.asked.fields.kind == SiteGreeting.kind
            if is_greeting and now - self._contacts[delivery.site].greeted >= _GREETING_S:
                self._report_trouble(delivery.site, f"did not answer a greeting in {_GREETING_S:g} s")
                self._end_conversation(delivery.site, "gone")
                self._tell_refused(delivery.site, number)

    def _tell_refused(self, site: str, number: int) -> None:
        """Have the engine ask another one that goes by the site's name, where there is one."""
        with self._lock:
            engine = self._engine
        if engine is not None:
            # an engine that is gone need not be told
            with contextlib.suppress(SocketLostError):
                write_message(engine[1], ShimMessage(REFUSED, number, site))

    def _drain_queue(self) -> None:
        while True:
            try:
                engine, message = self._messages.get_nowait()
            except queue.Empty:
                return
            self._handle_engine_message(engine, message)

    def _wait_message(self, timeout_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            self._handle_engine_message(*self._messages.get(timeout=timeout_s))

    def _handle_engine_message(self, engine: int, message: ShimMessage | None) -> None:
        """Take one message of an engine; None that it is gone."""
        if engine < self._current_engine:
            return
        if engine > self._current_engine or message is None:
            # what an engine that is gone was given is lost
            self._current_engine = engine
            for site, contact in self._contacts.items():
                contact.is_near = False
                self._end_conversation(site, "gone")
        if message is None:
            return
        if message.kind == SITES:
            self._note_reachable(message.data.decode("utf-8", "replace").split("\n"))
        elif message.kind == LOST and (lost := self._open.get(message.number)) is not None:
            self._report_trouble(lost.site, printable_text(message.data.decode("utf-8", "replace"), _MAX_WORDS))
            self._end_conversation(lost.site, "gone")
        elif message.kind == ANSWER and (delivery := self._open.get(message.number)) is not None:
            self._take_answer(delivery, message)

    def _take_answer(self, delivery: _Delivery, message: ShimMessage) -> None:
        site, contact = delivery.site, self._contacts[delivery.site]
        try:
            frame = contact.conversation.receive_answer(message.data, delivery.asked)
        except (TransportError, VerificationError) as exc:
            self._report_trouble(site, f"the engine's answer is refused: {printable_text(str(exc), _MAX_WORDS)}")
            self._end_conversation(site, "refused")
            self._tell_refused(site, message.number)
            return
        del self._open[message.number]
        fields = frame.header.fields
        if delivery.asked.fields.kind == SiteGreeting.kind:
            contact.trouble = ""
            self._say(f"{site}: joined the session")
        elif fields.kind != SiteLeft.kind:
            self._ready.append(CarriedReply(site, fields.kind, fields.body, frame.payload))

    def _note_reachable(self, names: Iterable[str]) -> None:
        named = set(names)
        for site, contact in self._contacts.items():
            was, contact.is_near = contact.is_near, site in named
            if was and not contact.is_near:
                self._report_trouble(site, "the engine cannot reach it")
                self._end_conversation(site, "gone")

    def _end_conversation(self, site: str, reason: str, *, is_asked: bool = False) -> None:
        """End the conversation with a site; it is greeted anew, if it can be reached."""
        for number in [number for number, delivery in self._open.items() if delivery.site == site]:
            is_asked |= self._open.pop(number).asked.fields.kind != SiteGreeting.kind
            self._claim_answer(number)
        self._contacts[site].conversation.end_conversation()
        if is_asked:
            self._ready.append(LostSite(site, reason))

    def _report_trouble(self, site: str, what: str) -> None:
        if self._contacts[site].trouble != what:
            self._contacts[site].trouble = what
            self._say(f"{site}: {what}")

    def _deliver_frame(self, site: str, asked: SignedHeader, raw: bytes) -> None:
        self._last_number += 1
        self._open[self._last_number] = _Delivery(site, asked)
        with self._lock:
            engine = self._engine
            self._unanswered.add(self._last_number)
        if engine is None:
            self._end_conversation(site, "gone")
            return
        try:
            write_message(engine[1], ShimMessage(ORDER, self._last_number, site, raw))
        except SocketLostError as exc:
            self._report_trouble(site, str(exc))
            self._end_conversation(site, "gone")
            _close_socket(engine[1])

    def _await_engines(self) -> None:
        """Take engines that connect; a new one takes the place of the one before."""
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with self._lock:
                if self._closed.is_set():
                    connection.close()
                    return
                self._engines += 1
                before, self._engine = self._engine, (self._engines, connection)
            if before is not None:
                _close_socket(before[1])
            self._say("an engine connected")
            threading.Thread(target=self._read_engine_messages, args=(self._engines, connection), daemon=True).start()

    def _read_engine_messages(self, number: int, line: socket.socket) -> None:
        try:
            while (message := read_message(line, self._limits.max_frame_bytes)) is not None:
                # answers are large, and nobody takes them while the owner sums
                if message.kind != ANSWER or self._claim_answer(message.number):
                    self._queue_engine_message(number, message)
        except SocketLostError as exc:
            if not self._closed.is_set():
                self._say(f"the engine disconnected: {exc}")
        finally:
            with self._lock:
                if self._engine is not None and self._engine[0] == number:
                    self._engine = None
            _close_socket(line)
            self._queue_engine_message(number, None)

    def _claim_answer(self, number: int) -> bool:
        """Return whether this is the first answer to a frame; there is no other one from then on."""
        with self._lock:
            is_first = number in self._unanswered
            self._unanswered.discard(number)
            return is_first

    def _queue_engine_message(self, number: int, message: ShimMessage | None) -> None:
        """Hand over a message, as long as it is waited for at all."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._messages.put((number, message), timeout=_LOOK_EVERY_S)
                return


def _close_socket(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()
