"""Requests, answers and open frames of each worker; a worker that costs more than it brings is left out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.rollouts.bundle import SignedAnswer
from phalanx.rollouts.request import RolloutRequest
from phalanx.rollouts.rollout import Rollout
from phalanx.transport import SignedHeader

_SPARE_FRAMES = 16
_ANSWERS_FOR_ONE = 32


@dataclass
class SentRequest:
    """A request to one worker, and its signed records.

    Attributes:
        refusal: Why the worker does not answer.
        texts: Texts of an answer that was in order.
        is_open: Whether an answer is still of use.
    """

    worker: str
    request: RolloutRequest
    header: SignedHeader
    answer: SignedAnswer | None = None
    refusal: str | None = None
    texts: tuple[Rollout, ...] = ()
    is_open: bool = True

    @property
    def is_settled(self) -> bool:
        """Tell whether nothing further is expected from the worker."""
        return self.answer is not None or self.refusal is not None

    def shrink_answer(self) -> None:
        """Shrink the stored answer to the parts that a second answer would be compared with."""
        self.is_open, self.texts = False, ()
        if self.answer is not None:
            self.answer = SignedAnswer(self.answer.header, b"")


class WriterAccounts:
    """An account for each worker of requests, frames and answers.

    Args:
        max_unanswered: Requests that a worker may leave without a usable answer in time; every 32 answers allow one
            more, so that a worker that is silent now and then costs at most that share of the steps.
    """

    def __init__(self, max_unanswered: int) -> None:
        self._max_unanswered = max_unanswered
        self._requests: Counter[str] = Counter()
        self._frames: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self._unanswered: Counter[str] = Counter()

    @property
    def unanswered_requests(self) -> Mapping[str, int]:
        """Requests without a usable answer in time, by worker."""
        return dict(self._unanswered)

    def count_request(self, worker: str) -> None:
        """Count a request that was sent."""
        self._requests[worker] += 1

    def count_frame(self, worker: str) -> str | None:
        """Count a frame of a worker, whatever is in it; says why it is one too many."""
        self._frames[worker] += 1
        if self._frames[worker] <= self._requests[worker] + _SPARE_FRAMES:
            return None
        return f"sent {self._frames[worker]} frames, was asked {self._requests[worker]} times"

    def count_answer(self, worker: str) -> None:
        """Count an answer that was used."""
        self._answers[worker] += 1

    def count_unanswered(self, worker: str, reason: str) -> str | None:
        """Count a request without a usable answer in time; says why it is one too many."""
        self._unanswered[worker] += 1
        missing, answers = self._unanswered[worker], self._answers[worker]
        if missing <= self._max_unanswered + answers // _ANSWERS_FOR_ONE:
            return None
        return f"left {missing} requests without a usable answer in time and answered {answers}; the last: {reason}"
