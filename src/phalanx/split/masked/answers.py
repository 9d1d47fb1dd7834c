"""The trusted side's answers from workers, sorted for several threads that wait at once."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from phalanx.errors import FrameError, PeerLostError, TransportError, VerificationError
from phalanx.security.mask import MaskedMessage, ProductMessage
from phalanx.split.masked.messages import PRODUCT, REFUSED, read_masked, read_refusal
from phalanx.transport import CheckedFrame, Endpoint, LinkFault

_LOOK_EVERY_S = 0.5

Key = tuple[ProductMessage, int]


class AnswerSorter:
    """A thread that takes an endpoint's frames; no other thread may receive from that endpoint.

    Answers that were not asked for are dropped, so a worker cannot fill this side's memory.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._expected: dict[str, set[Key]] = defaultdict(set)
        self._answers: dict[str, dict[Key, MaskedMessage]] = defaultdict(dict)
        self._faults: dict[str, TransportError | VerificationError] = {}
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._receive_answers, name="masked-answers", daemon=True)
        self._thread.start()

    def expect_answers(self, worker: str, requests: Sequence[MaskedMessage]) -> None:
        """Say, before they are sent, which requests will be answered."""
        with self._changed:
            self._check_worker(worker)
            self._expected[worker].update(_answer_key(request) for request in requests)

    def collect_answers(
        self, worker: str, requests: Sequence[MaskedMessage], timeout_s: float, is_alive: Callable[[], bool]
    ) -> list[MaskedMessage]:
        """Wait for the answers to requests, and return them in the order of these.

        Raises:
            PeerLostError: They did not come within the time, or the worker's process has ended.
        """
        keys = [_answer_key(request) for request in requests]
        deadline = time.monotonic() + timeout_s
        with self._changed:
            came = self._answers[worker]
            try:
                while not all(key in came for key in keys):
                    self._check_worker(worker)
                    remaining_s = deadline - time.monotonic()
                    missing = sum(key not in came for key in keys)
                    if remaining_s <= 0:
                        raise PeerLostError(f"{worker}: did not answer {missing} requests in {timeout_s:g} s")
                    if not is_alive():
                        raise PeerLostError(f"{worker}: its process has ended; {missing} requests are unanswered")
                    self._changed.wait(min(remaining_s, _LOOK_EVERY_S))
                return [came[key] for key in keys]
            finally:
                self._expected[worker].difference_update(keys)
                for key in keys:
                    came.pop(key, None)

    def close(self) -> None:
        """Stop; threads that wait get an error."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        self._thread.join(2 * _LOOK_EVERY_S)

    def _check_worker(self, worker: str) -> None:
        if worker in self._faults:
            raise self._faults[worker]
        if self._is_over:
            raise PeerLostError(f"{worker}: the links to workers are closed")

    def _receive_answers(self) -> None:
        while not self._is_over:
            item = self._endpoint.receive_item(_LOOK_EVERY_S)
            if item is None:
                continue
            with self._changed:
                if isinstance(item, LinkFault):
                    self._faults.setdefault(item.peer, item.error)
                else:
                    self._sort_answer(item)
                self._changed.notify_all()

    def _sort_answer(self, item: CheckedFrame) -> None:
        try:
            answer = _read_answer(item)
        except FrameError as exc:
            self._faults.setdefault(item.sender, exc)
            return
        if _answer_key(answer) in self._expected[item.sender]:
            self._answers[item.sender][_answer_key(answer)] = answer


def _read_answer(item: CheckedFrame) -> MaskedMessage:
    if item.kind == REFUSED:
        raise FrameError(f"{item.sender}: has no answer: {read_refusal(item.body)}")
    if item.kind != PRODUCT:
        raise FrameError(f"{item.sender}: sent {item.kind!r}, which is no answer")
    return read_masked(item.body, item.payload)


def _answer_key(masked: MaskedMessage) -> Key:
    return masked.product, masked.number
