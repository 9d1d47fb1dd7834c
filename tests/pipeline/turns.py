"""A company of parties that take turns: one thread runs at a time, in an order that a seed decides."""

import random
import threading
from types import SimpleNamespace
from unittest.mock import patch

from phalanx.errors import PeerLostError, PeerRefusedError, PhalanxError, SignatureError, TransportError
from phalanx.pipeline import AuditDraw
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.membership import join
from phalanx.pipeline.protocol.messages import Carry
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.testing import CompanyClock, MemoryCompany, RewritingEndpoint
from phalanx.transport import Endpoint
from phalanx.transport.inbox import CheckedFrame, Inbox
from phalanx.transport.link import SendingChain, read_answer
from phalanx.transport.outbox import DeliveredFrame, Outbox

MAX_S_PER_TURN = 600.0
"""A turn takes milliseconds; a machine that is out of memory has made one last a minute."""
MAX_TURNS = 30_000
MAX_CARRIED_BYTES = 2**18
"""Of a header: a longer one is too long to be carried, and its frame is one that no link takes."""


class EndlessError(AssertionError):
    """A party did not come to rest, or none got any further."""


class Turns:
    """The turns of a company: the owner may run, or the one worker that it has given its turn to.

    Attributes:
        num_given: Turns that workers have had.
    """

    def __init__(self, seed: int, clock: CompanyClock) -> None:
        self.num_given = 0
        self._clock = clock
        self._random = random.Random(seed) if seed else None
        self._is_over = False
        self._back = threading.Semaphore(0)
        self._ends: dict[str, TurnEndpoint] = {}
        self._begins: dict[str, threading.Semaphore] = {}
        self._until: dict[str, float] = {}

    @property
    def is_over(self) -> bool:
        """Whether all parties may run: the company is being taken apart."""
        return self._is_over

    def add(self, name: str, endpoint: "TurnEndpoint") -> None:
        """A worker is about to start."""
        self._ends[name], self._begins[name], self._until[name] = endpoint, threading.Semaphore(0), 0.0

    def begin(self, name: str) -> None:
        """As a worker: wait for the first turn."""
        self._begins[name].acquire()

    def wait(self, name: str, seconds: float) -> None:
        """As a worker: let others run until there is mail or so much time has passed."""
        self._until[name] = self._clock.awake_seconds() + seconds
        self._back.release()
        self._begins[name].acquire()

    def end(self, name: str) -> None:
        """As a worker: there will be no further turn."""
        del self._ends[name]
        self._back.release()

    def give(self) -> bool:
        """As the owner: let one worker run that has anything to do; False when none has."""
        now = self._clock.awake_seconds()
        able = sorted(name for name, end in self._ends.items() if end.has_news or now >= self._until[name])
        if not able:
            return False
        name = able[self.num_given % len(able)] if self._random is None else self._random.choice(able)
        self.num_given += 1
        if self.num_given > MAX_TURNS:
            raise EndlessError(f"{MAX_TURNS} turns and no end; the last was {name}'s")
        self._begins[name].release()
        if not self._back.acquire(timeout=MAX_S_PER_TURN):
            raise EndlessError(f"{name} had not come to rest after {MAX_S_PER_TURN:.0f} s")
        return True

    def chance(self) -> bool:
        """Whether others come first although one could go on."""
        return self._random is not None and self._random.random() < 0.1

    def finish(self) -> None:
        """Let all parties run from now on."""
        self._is_over = True
        for begin in self._begins.values():
            begin.release()


class FullInbox(Inbox):
    """Refuses at once where a real one first waits for room: no thread can make any meanwhile."""

    max_bytes = 0

    def put_frame(self, item, size_bytes, timeout_s):
        super().put_frame(item, size_bytes, 0.0)
        self.max_bytes = max(self.max_bytes, self._queued[item.sender])

    @property
    def has_news(self):
        return bool(self._items) or self._closed


class InlineOutbox(Outbox):
    """Delivers each frame in its sender's turn; a receiver that is not on the network is gone."""

    def queue_frame(self, kind, body, payload):
        header = super().queue_frame(kind, body, payload)
        try:
            while self._queue:
                queued, raw = self._queue[0]
                answer = self._wire.deliver_frame(self._peer.name, raw, 1.0)
                self._report(DeliveredFrame(queued, read_answer(answer, queued, self._peer), len(raw)))
                self._remove_taken(len(raw))
        except (TransportError, SignatureError) as exc:
            self.fail_link(exc)
        return header

    def _deliver_all(self):
        """Nothing is left to the thread."""


class InlineEndpoint(Endpoint):
    """Sends without threads."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._inbox = FullInbox(self._limits.max_queued_bytes)

    @property
    def has_news(self):
        return self._inbox.has_news

    @property
    def most_queued_bytes(self):
        return self._inbox.max_bytes

    def _outbox_for(self, receiver):
        link = self._links.get(receiver)
        if link is None or receiver in self._evicted or self._closed:
            raise PeerRefusedError(f"{receiver}: is unknown, evicted, or this endpoint is closed")
        if receiver not in self._outboxes:
            chain = SendingChain(self._identity, self._run, receiver, self._limits)
            box = InlineOutbox(chain, link.peer, self._wire, self._limits, self._meter, report=self._report_delivery)
            self._outboxes[receiver] = box
        return self._outboxes[receiver]


class InsidersEndpoint(InlineEndpoint):
    """Notes what it sends and gets where a test wants to know, and goes on where an honest party would stop."""

    noted: list | None = None
    led: frozenset[str] = frozenset()

    def end_link(self, receiver, reason):
        self.led |= {receiver}
        super().end_link(receiver, reason)

    def send_frame(self, receiver, kind, body, payload=()):
        if self.noted is None:
            return super().send_frame(receiver, kind, body, payload)
        try:
            header = super().send_frame(receiver, kind, body, payload)
        except PeerLostError:
            if receiver not in self.led:
                return None
            # where a link is led, an insider's words go by way of the owner like anybody's
            header = Endpoint.put_aside(self, receiver, kind, body, payload)
            if len(header.header_bytes) > MAX_CARRIED_BYTES:
                return None
            carry = Carry(epoch=0, header=to_signed(header))
            super().send_frame(OWNER, carry.kind, carry.model_dump(mode="json"), payload)
        except PhalanxError:
            # it said what cannot even be sent
            return None
        self.noted.append((header, b"".join(payload)))
        return header

    def seal_for_self(self, kind, body, payload=()):
        try:
            return super().seal_for_self(kind, body, payload)
        except PhalanxError:
            if self.noted is None:
                raise
            return super().seal_for_self(kind, {}, payload)


class TurnEndpoint(RewritingEndpoint, InsidersEndpoint):
    """A worker's end: while it waits, others run."""

    turns: Turns

    def receive_item(self, timeout_s):
        if self.turns.is_over:
            return super().receive_item(timeout_s)
        item = super().receive_item(0.0)
        if (item is None and timeout_s) or (item is None and self.turns.chance()):
            self.turns.wait(self.party_name, timeout_s)
            item = super().receive_item(0.0)
        if self.noted is not None and isinstance(item, CheckedFrame):
            self.noted.append((item.header, bytes(item.payload)))
        return item


class TurnOwnersEndpoint(InlineEndpoint):
    """The owner's end: while it waits, workers run, and time passes where none of them can."""

    def __init__(self, *args, turns, clock):
        super().__init__(*args)
        self._turns, self._clock = turns, clock

    def receive_item(self, timeout_s):
        if timeout_s == 0.0 and self._turns.chance():
            self._turns.give()
        item = super().receive_item(0.0)
        while item is None and timeout_s:
            if not self._turns.give():
                self._clock.pass_time(timeout_s)
                return super().receive_item(0.0)
            item = super().receive_item(0.0)
        return item


class TurnCompany(MemoryCompany):
    """A company in which the same seed and the same actors give the same events.

    Attributes:
        turns: Which party may run.
        crashes: How workers ended that ended with an error that is not ours.
    """

    _endpoint_class = TurnEndpoint
    _owners_class = TurnOwnersEndpoint

    def __init__(self, run, directory, actors=None, *, order=0, noted=None, draw=None, **kwargs):
        # what is audited is decided by the seed as well
        draw = draw or AuditDraw.from_guard(order.to_bytes(32, "big"), bytes(32), run.guard)
        super().__init__(run, directory, actors, draw=draw, **kwargs)
        self.turns = Turns(order, self.clock)
        self.crashes = {}
        self._noted = noted or {}

    @property
    def has_begun(self):
        """Whether roles were given out and taken."""
        return self._is_under_way

    @property
    def most_queued_bytes(self):
        """Bytes that ever lay in one party's inbox from one sender."""
        return max(end.most_queued_bytes for end in (self._owner, *self._endpoints.values()))

    def _owners_endpoint(self):
        wire, limits = self._network.wire_for(OWNER), self.run_config.pipeline.transport
        self._owner = self._owners_class(
            self._home.owner, {}, self.session, wire, limits, turns=self.turns, clock=self.clock
        )
        return self._owner

    def _start_company(self, stack):
        # who joins is waited for on the simulation's clock
        stack.enter_context(patch.object(join, "time", SimpleNamespace(monotonic=self.clock.awake_seconds)))
        super()._start_company(stack)

    def _make_endpoint(self, name):
        endpoint = super()._make_endpoint(name)
        endpoint.turns, endpoint.noted = self.turns, self._noted.get(name)
        self.turns.add(name, endpoint)
        return endpoint

    def _run_worker(self, name):
        self.turns.begin(name)
        try:
            super()._run_worker(name)
        except Exception as exc:  # noqa: BLE001 - told by whoever judges what came of it
            self.crashes[name] = exc
        finally:
            self.turns.end(name)

    def _end_workers(self):
        self.turns.finish()
        super()._end_workers()
