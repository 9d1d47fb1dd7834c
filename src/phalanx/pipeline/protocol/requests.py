"""The owner's requests to parties and their answers, and clocks of silence: how long nothing may happen."""

import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Ask, Bulk, Fetch, FetchBulk, FetchReply, ProgressReport
from phalanx.pipeline.protocol.needs import MessageNeed, ProgressNeed, TensorsNeed
from phalanx.pipeline.protocol.tensor_stream import PART_BYTES, BulkReceiver, Post
from phalanx.transport import Allowances

_HONEST_TIMES = 4.0
_STEPS_REMEMBERED = 100
_KNOCK_SHARE = 1 / 3
_LONGEST_LOOK_AWAY_S = 1.0


class AwakeClock:
    """An owner's monotonic clock; the time that others are held to stands still while its reader does not look at it.

    An owner that was stopped, swapped out or starved cannot tell how long others were silent meanwhile: of the time
    between two looks no more than a second counts. A listening owner looks many times a second.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._awake_s = 0.0

    def awake_seconds(self) -> float:
        """Seconds awake so far."""
        now = time.monotonic()
        self._awake_s += min(now - self._last, _LONGEST_LOOK_AWAY_S)
        self._last = now
        return self._awake_s

    def wall_seconds(self) -> float:
        """Seconds, those not looked at included: for how long the whole of something may take."""
        return time.monotonic()


class Patience:
    """A measurement of the gaps between messages; a gap is too long when no recent honest step had one nearly as long.

    Args:
        patience_s: A gap that is never too long, seconds; four times as long is always too long.

    Guarantees:
        A party that makes every step slow, each a little more than the last, does not make the limit rise for ever.
    """

    def __init__(self, patience_s: float, clock: AwakeClock) -> None:
        self.patience_s = patience_s
        self.clock = clock
        self._honest_gaps_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._max_gap_s, self._was_probed, self._has_announced_probe = 0.0, False, False
        self._gap_started_s = clock.awake_seconds()

    def begin_attempt(self) -> None:
        """A step, or an attempt at one, begins."""
        self._max_gap_s, self._was_probed = 0.0, False
        self._restart_gap()

    def note_message(self) -> None:
        """Something has happened."""
        self._max_gap_s = max(self._max_gap_s, self.clock.awake_seconds() - self._gap_started_s)
        self._restart_gap()

    def note_probe(self) -> None:
        """Note that a party was asked for its progress: this attempt's gaps say nothing about honest ones."""
        self._was_probed = True
        self._restart_gap()

    def end_attempt(self) -> None:
        """The step was decided."""
        if not self._was_probed:
            self._honest_gaps_s.append(self._max_gap_s)

    @property
    def limit_s(self) -> float:
        """Four times the longest gap of the last honest steps, but at least patience and at most four times that."""
        max_gap_s = min(max(self._honest_gaps_s, default=0.0), self.patience_s)
        return max(self.patience_s, _HONEST_TIMES * max_gap_s)

    @property
    def is_too_long(self) -> bool:
        """Whether the present gap is longer than the limit."""
        return self.clock.awake_seconds() - self._gap_started_s > self.limit_s

    @property
    def is_beyond_any_limit(self) -> bool:
        """Whether the present gap is longer than any limit, where honest ones are not known: while roles change."""
        return self.clock.awake_seconds() - self._gap_started_s > _HONEST_TIMES * self.patience_s

    def is_time_to_probe(self) -> bool:
        """Whether a third of the limit has gone by; true once in a gap."""
        if self._has_announced_probe or self.clock.awake_seconds() - self._gap_started_s <= _KNOCK_SHARE * self.limit_s:
            return False
        self._has_announced_probe = True
        return True

    def _restart_gap(self) -> None:
        self._gap_started_s, self._has_announced_probe = self.clock.awake_seconds(), False


@dataclass(eq=False)
class PendingRequest:
    """One request under way.

    Attributes:
        last_heard_s: Time of the answer's last part, by the requests' clock.
        party: The one that was asked; empty when several were.
        number: Number of the request, which its answer names; 0 where several parties were asked.
    """

    last_heard_s: float
    party: str = ""
    number: int = 0
    answer: ReceivedMessage | None = None
    bulk: BulkReceiver | None = None
    tensors: dict[str, Tensor] | None = None
    num_steps: int = -1
    progress_reports: dict[str, ProgressReport | None] | None = None

    @property
    def is_answered(self) -> bool:
        """Whether all of the answer is there."""
        if self.progress_reports is not None:
            return None not in self.progress_reports.values()
        return self.answer is not None or self.tensors is not None

    def result_for(self, need: MessageNeed | TensorsNeed | ProgressNeed) -> object:
        """What the need is worth to the code that awaits it."""
        match need:
            case MessageNeed():
                return self.answer
            case TensorsNeed():
                return None if self.tensors is None else (self.tensors, self.num_steps)
            case ProgressNeed():
                return {party: report for party, report in (self.progress_reports or {}).items() if report is not None}


class Requests:
    """The owner's requests under way; an answer counts by its digest, which the code that needs it checks.

    Args:
        allowances: Told of each answer that a party is asked for: frames, and bytes.
        answer_bytes: Maximum of one frame of an answer, beside parts of longer ones.
        timeout_s: Seconds without an answer, or a further part of a long one, after which there is none.
    """

    def __init__(
        self, post: Post, clock: AwakeClock, allowances: Allowances, answer_bytes: int, timeout_s: float = 30.0
    ) -> None:
        self.timeout_s = timeout_s
        self._post = post
        self._clock = clock
        self._allowances = allowances
        self._answer_bytes = answer_bytes
        self._last_number = 0
        self._fetches: dict[int, tuple[Fetch, PendingRequest]] = {}
        self._bulks: dict[int, tuple[FetchBulk, PendingRequest]] = {}
        self._standings: dict[str, ProgressReport | None] = {}
        self._asked = (-1, -1)
        self._asked_before: set[tuple[str, int, str]] = set()

    # --- what arrives -----------------------------------------------------------------------------

    def accept_answer(self, received: ReceivedMessage) -> bool:
        """Take the answer to a request under way; False when it is none."""
        message = received.message
        if isinstance(message, FetchReply) and message.request in self._fetches:
            fetch, waiting = self._fetches[message.request]
            is_about = (message.step, message.key, message.claim) == (fetch.step, fetch.key, fetch.claim)
            if is_about and waiting.party == received.sender:
                waiting.answer = received
                return True
        if isinstance(message, Bulk) and message.request in self._bulks:
            order, waiting = self._bulks[message.request]
            is_about = (message.stage, message.purpose) == (order.stage, order.purpose)
            if is_about and waiting.party == received.sender and waiting.bulk is not None:
                waiting.last_heard_s = self._clock.awake_seconds()
                waiting.tensors = waiting.bulk.add_part(message.offset, message.total, received.payload)
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
        return self._clock.awake_seconds() - pending.last_heard_s >= self.timeout_s

    # --- what is asked for ------------------------------------------------------------------------

    def begin_request(self, need: MessageNeed | TensorsNeed | ProgressNeed) -> PendingRequest:
        """Ask; the answer comes in with everything else."""
        if isinstance(need, ProgressNeed):
            return self._ask_progress(need.parties, need.request)
        if isinstance(need, TensorsNeed):
            return self.order_tensors(need.party, need.request, need.expected)
        party, request = need.party, need.request
        self._asked_before.add((party, request.source, request.direction))
        self._allowances.grant_frames(party, 1, self._answer_bytes)
        number = self._next_number()
        pending = PendingRequest(self._clock.awake_seconds(), party, number)
        self._fetches[number] = request, pending
        self._post(party, request.model_copy(update={"request": number}), ())
        return pending

    def order_tensors(self, party: str, request: FetchBulk, expected: Mapping[str, Tensor]) -> PendingRequest:
        """Ask for tensors."""
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
        num_parts = size_bytes // PART_BYTES + 1
        self._asked_before.add((party, request.stage, request.purpose))
        self._allowances.grant_frames(party, num_parts, size_bytes + num_parts * self._answer_bytes)
        number = self._next_number()
        pending = PendingRequest(self._clock.awake_seconds(), party, number, bulk=BulkReceiver(expected))
        self._bulks[number] = request, pending
        self._post(party, request.model_copy(update={"request": number}), ())
        return pending

    def end_request(self, pending: PendingRequest) -> None:
        """Take no more of an answer: it is whole, or its time is over."""
        if pending.progress_reports is not None:
            self._standings = {}
        self._fetches.pop(pending.number, None)
        self._bulks.pop(pending.number, None)

    def forget_orders(self) -> None:
        """Take no more of the states that were ordered for a checkpoint."""
        self._bulks = {number: waiting for number, waiting in self._bulks.items() if waiting[0].purpose != "duplicate"}

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _ask_progress(self, parties: Collection[str], request: Ask) -> PendingRequest:
        self._standings, self._asked = dict.fromkeys(parties), (request.epoch, request.step)
        pending = PendingRequest(self._clock.awake_seconds(), progress_reports=self._standings)
        for party in parties:
            self._post(party, request, ())
        return pending
