"""Ask a party for tensors and wait for the answer, while everything else goes on."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from phalanx.errors import FrameError
from phalanx.pipeline.protocol.messages import Ask, Bulk, Fetch, FetchBulk, Fetched, Standing
from phalanx.pipeline.protocol.patience import Awake
from phalanx.pipeline.protocol.received import Received
from phalanx.pipeline.protocol.tensor_stream import PART_BYTES, BulkReceiver, Post


@dataclass(eq=False)
class Pending:
    """One request under way.

    Attributes:
        party: Who was asked.
        tensors: What came of a request for tensors, once it is whole.
        num_steps: The optimizer steps that they had taken.
        heard: When anything of the answer came last, seconds of the courier's clock.
    """

    party: str
    heard: float
    answer: Received | None = None
    bulk: BulkReceiver | None = None
    tensors: dict[str, Tensor] | None = None
    num_steps: int = -1


class Requests:
    """Requests of the owner; an answer is judged by its digest, by whoever asked for it."""

    def __init__(self, post: Post, pump: Callable[[], None], clock: Awake, timeout_s: float) -> None:
        """Make one.

        Args:
            post: Sends a message.
            pump: Handles what has arrived and does a piece of work, or waits a little.
            clock: Where time is read.
            timeout_s: After so long without an answer, or a further part of a long one, there is none.
        """
        self._post = post
        self._pump = pump
        self._clock = clock
        self.timeout_s = timeout_s
        self.is_gone: Callable[[str], bool] = lambda party: False
        """Whether a party is known to be gone, so that nobody need wait for it."""
        self._fetches: dict[tuple[int, int, int, str, bool], Pending] = {}
        self._bulks: dict[tuple[int, int, str], Pending] = {}
        self._standings: dict[str, Standing | None] = {}
        self._asked = (-1, -1)
        self._asked_before: set[tuple[str, int, str]] = set()
        self.unanswered: set[str] = set()
        """Parties that left a request without an answer since `forget_silence`."""
        self.expect: Callable[[str, int, int], None] = lambda party, messages, size_bytes: None
        """Told of each answer that a party is asked for: frames, and bytes beside those of one tensor each."""

    def accepts(self, received: Received) -> bool:
        """Take an answer that somebody waits for; False when it is not for the courier."""
        message = received.message
        if isinstance(message, Fetched):
            waiting = self._fetches.get(_fetch_key(message))
            if waiting is not None and waiting.party == received.sender:
                waiting.answer = received
                return True
        if isinstance(message, Bulk):
            waiting = self._bulks.get((message.stage, message.lane, message.purpose))
            if waiting is not None and waiting.party == received.sender and waiting.bulk is not None:
                waiting.heard = self._clock.now()
                waiting.tensors = waiting.bulk.add(message.offset, message.total, received.payload)
                waiting.num_steps = message.step
                return True
        if isinstance(message, Standing) and received.sender in self._standings:
            # one that was asked for earlier and comes late says nothing about now
            if (message.epoch, message.step) == self._asked:
                self._standings[received.sender] = message
            return True
        return False

    def was_asked(self, received: Received) -> bool:
        """Whether this answers a request of ours that nobody waits for any more."""
        message = received.message
        if isinstance(message, Fetched):
            return (received.sender, message.source, message.direction) in self._asked_before
        if isinstance(message, Bulk):
            return (received.sender, message.stage, message.purpose) in self._asked_before
        return False

    def has_lapsed(self, order: Pending) -> bool:
        """Whether an answer, or the next part of it, has not come in time."""
        return self._clock.now() - order.heard >= self.timeout_s

    def ask(self, parties: Collection[str], request: Ask) -> dict[str, Standing]:
        """Ask parties how far they are; who does not answer in time is left out."""
        self._standings, self._asked = dict.fromkeys(parties), (request.epoch, request.step)
        try:
            for party in parties:
                self._post(party, request, ())
            self._wait(lambda: None not in self._standings.values(), self._order(""))
            return {party: answer for party, answer in self._standings.items() if answer is not None}
        finally:
            self._standings = {}

    def fetch(self, party: str, request: Fetch) -> Received | None:
        """Ask for one message or one claim; None when no answer came in time."""
        key = _fetch_key(request)
        self._asked_before.add((party, request.source, request.direction))
        self.expect(party, 1, 0)
        waiting = self._fetches[key] = self._order(party)
        try:
            self._post(party, request, ())
            self._wait(lambda: waiting.answer is not None, waiting)
        finally:
            del self._fetches[key]
        return waiting.answer

    def collect(
        self, party: str, request: FetchBulk, expected: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], int] | None:
        """Ask for a stage's state, weights, undo copy or gradient.

        Args:
            party: Who is asked.
            request: What for.
            expected: Names, shapes and types; values are not read.

        Returns:
            The tensors and the optimizer steps they had taken; None when no answer came in time.
        """
        key = (request.stage, request.lane, request.purpose)
        waiting = self._bulks[key] = self._bulk_order(party, request, expected)
        try:
            self._post(party, request, ())
            self._wait(lambda: waiting.tensors is not None, waiting)
        except FrameError:
            return None
        finally:
            del self._bulks[key]
        return None if waiting.tensors is None else (waiting.tensors, waiting.num_steps)

    def order(self, party: str, request: FetchBulk, expected: Mapping[str, Tensor]) -> Pending:
        """As `collect`, without waiting: the answer comes in while everything else goes on."""
        order = self._bulk_order(party, request, expected)
        self._bulks[(request.stage, request.lane, request.purpose)] = order
        self._post(party, request, ())
        return order

    def forget_silence(self) -> None:
        """An attempt begins: what was not answered before it says nothing about it."""
        self.unanswered.clear()

    def forget_orders(self) -> None:
        """Take no more of what `order` has asked for."""
        self._bulks = {key: waiting for key, waiting in self._bulks.items() if key[2] != "duplicate"}

    def _wait(self, done: Callable[[], bool], waiting: Pending) -> None:
        while not (done() or self.is_gone(waiting.party) or self.has_lapsed(waiting)):
            self._pump()
        if not done():
            self.unanswered.add(waiting.party)

    def _bulk_order(self, party: str, request: FetchBulk, expected: Mapping[str, Tensor]) -> Pending:
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
        num_parts = size_bytes // PART_BYTES + 1
        self._asked_before.add((party, request.stage, request.purpose))
        self.expect(party, num_parts, size_bytes)
        return self._order(party, expected)

    def _order(self, party: str, expected: Mapping[str, Tensor] | None = None) -> Pending:
        return Pending(party, self._clock.now(), bulk=None if expected is None else BulkReceiver(expected))


def _fetch_key(message: Fetch | Fetched) -> tuple[int, int, int, str, bool]:
    return (message.step, message.source, message.microbatch, message.direction, message.claim)
