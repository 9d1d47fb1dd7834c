"""The owner's requests to parties, and their answers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Ask, Bulk, Fetch, FetchBulk, FetchReply, ProgressReport
from phalanx.pipeline.protocol.needs import MessageNeed, ProgressNeed, TensorsNeed
from phalanx.pipeline.protocol.patience import Awake
from phalanx.pipeline.protocol.tensor_stream import PART_BYTES, BulkReceiver, Post
from phalanx.transport import Allowances


@dataclass(eq=False)
class PendingRequest:
    """One request under way.

    Attributes:
        heard: When anything of the answer came last, seconds of the requests' clock.
        party: The one that was asked; empty when several were.
        answer: What came of a request for a message.
        tensors: What came of a request for tensors, once it is whole.
        num_steps: The optimizer steps that they had taken.
        standings: What came of a question to several parties, by party.
    """

    heard: float
    party: str = ""
    answer: ReceivedMessage | None = None
    bulk: BulkReceiver | None = None
    tensors: dict[str, Tensor] | None = None
    num_steps: int = -1
    standings: dict[str, ProgressReport | None] | None = None

    @property
    def is_answered(self) -> bool:
        """Whether all of the answer is there."""
        if self.standings is not None:
            return None not in self.standings.values()
        return self.answer is not None or self.tensors is not None


class Requests:
    """The owner's requests under way; an answer counts by its digest, which the code that needs it checks.

    Args:
        post: Sends a message.
        clock: Where time is read.
        allowances: Told of each answer that a party is asked for: frames, and bytes.
        answer_bytes: Of one frame of an answer at most, beside parts of something longer.
    """

    def __init__(self, post: Post, clock: Awake, allowances: Allowances, answer_bytes: int) -> None:
        self.timeout_s = 30.0
        """Seconds without an answer, or a further part of a long one, after which there is none."""
        self._post = post
        self._clock = clock
        self._allowances = allowances
        self._answer_bytes = answer_bytes
        self._fetches: dict[tuple[int, int, int, str, bool], PendingRequest] = {}
        self._bulks: dict[tuple[int, str], PendingRequest] = {}
        self._standings: dict[str, ProgressReport | None] = {}
        self._asked = (-1, -1)
        self._asked_before: set[tuple[str, int, str]] = set()

    # --- what arrives -----------------------------------------------------------------------------

    def accepts(self, received: ReceivedMessage) -> bool:
        """Take the answer to a request under way; False when it is none."""
        message = received.message
        if isinstance(message, FetchReply):
            waiting = self._fetches.get(_fetch_key(message))
            if waiting is not None and waiting.party == received.sender:
                waiting.answer = received
                return True
        if isinstance(message, Bulk):
            waiting = self._bulks.get((message.stage, message.purpose))
            if waiting is not None and waiting.party == received.sender and waiting.bulk is not None:
                waiting.heard = self._clock.now()
                waiting.tensors = waiting.bulk.add(message.offset, message.total, received.payload)
                waiting.num_steps = message.step
                return True
        if isinstance(message, ProgressReport) and received.sender in self._standings:
            # one that was asked for earlier and comes late says nothing about now
            if (message.epoch, message.step) == self._asked:
                self._standings[received.sender] = message
            return True
        return False

    def was_asked(self, received: ReceivedMessage) -> bool:
        """Whether this answers a request of ours that is not under way any more."""
        message = received.message
        if isinstance(message, FetchReply):
            return (received.sender, message.source, message.direction) in self._asked_before
        if isinstance(message, Bulk):
            return (received.sender, message.stage, message.purpose) in self._asked_before
        return False

    def has_lapsed(self, pending: PendingRequest) -> bool:
        """Whether an answer, or the next part of it, has not come in time."""
        return self._clock.now() - pending.heard >= self.timeout_s

    # --- what is asked for ------------------------------------------------------------------------

    def begin(self, need: MessageNeed | TensorsNeed | ProgressNeed) -> PendingRequest:
        """Ask; the answer comes in with everything else."""
        if isinstance(need, ProgressNeed):
            return self._ask(need.parties, need.request)
        if isinstance(need, TensorsNeed):
            return self.order(need.party, need.request, need.expected)
        party, request = need.party, need.request
        self._asked_before.add((party, request.source, request.direction))
        self._allowances.grant(party, 1, self._answer_bytes)
        pending = self._fetches[_fetch_key(request)] = PendingRequest(self._clock.now(), party)
        self._post(party, request, ())
        return pending

    def order(self, party: str, request: FetchBulk, expected: Mapping[str, Tensor]) -> PendingRequest:
        """Ask for tensors."""
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
        num_parts = size_bytes // PART_BYTES + 1
        self._asked_before.add((party, request.stage, request.purpose))
        self._allowances.grant(party, num_parts, size_bytes + num_parts * self._answer_bytes)
        pending = PendingRequest(self._clock.now(), party, bulk=BulkReceiver(expected))
        self._bulks[(request.stage, request.purpose)] = pending
        self._post(party, request, ())
        return pending

    def end(self, need: MessageNeed | TensorsNeed | ProgressNeed) -> None:
        """Take no more of an answer: it is whole, or its time is over."""
        if isinstance(need, ProgressNeed):
            self._standings = {}
        elif isinstance(need, TensorsNeed):
            self._bulks.pop((need.request.stage, need.request.purpose), None)
        else:
            self._fetches.pop(_fetch_key(need.request), None)

    def forget_orders(self) -> None:
        """Take no more of the states that were ordered for a checkpoint."""
        self._bulks = {key: waiting for key, waiting in self._bulks.items() if key[1] != "duplicate"}

    def _ask(self, parties: Collection[str], request: Ask) -> PendingRequest:
        self._standings, self._asked = dict.fromkeys(parties), (request.epoch, request.step)
        pending = PendingRequest(self._clock.now(), standings=self._standings)
        for party in parties:
            self._post(party, request, ())
        return pending


def _fetch_key(message: Fetch | FetchReply) -> tuple[int, int, int, str, bool]:
    return (message.step, message.source, message.microbatch, message.direction, message.claim)
