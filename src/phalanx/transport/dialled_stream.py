"""Frames to a party that listens nowhere: it opens a stream, they come on it, and its answers go back.

    to the party    u64 number | frame
    from the party  u64 number | answer

What is between both, a router that translates addresses or a relay, sees the TLS of the two ends and nothing else.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import datetime

from phalanx.errors import PeerLostError
from phalanx.security.crypto import steady_now

_NUMBER_BYTES = 8


class DialledStream:
    """The listening party's end of one stream.

    Args:
        party: Name of the other end, as TLS has proven it.
        expires: End of its certificate: a stream outlives no certificate.
        hang_up: Ends the call, also where the party takes nothing of a frame that is on its way.
    """

    def __init__(self, party: str, expires: datetime, hang_up: Callable[[], object] = lambda: None) -> None:
        self._party, self._expires, self._hang_up = party, expires, hang_up
        self._questions: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting: dict[int, Future[bytes]] = {}
        self._numbers = itertools.count()
        self._lock, self._is_closed = threading.Lock(), False

    def exchange_frame(self, raw: bytes, timeout_s: float) -> bytes:
        """Return the party's answer to one frame.

        Raises:
            PeerLostError: None came within the time, the stream has ended, or the party's certificate has.
        """
        if steady_now() > self._expires:
            self.close()
        number, answer = next(self._numbers), Future[bytes]()
        with self._lock:
            if self._is_closed:
                raise PeerLostError(f"{self._party}: its stream has ended")
            self._waiting[number] = answer
        try:
            self._questions.put(number.to_bytes(_NUMBER_BYTES, "big") + raw)
            return answer.result(timeout_s)
        except FutureTimeoutError as exc:
            raise PeerLostError(f"{self._party}: no answer on its stream within {timeout_s:g} s") from exc
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def pop_questions(self) -> Iterator[bytes]:
        """Yield frames for the party, each behind its number, until the stream ends."""
        while (question := self._questions.get()) is not None:
            yield question

    def take_answers(self, answers: Iterable[bytes]) -> None:
        """Take the party's answers until its side of the stream ends; an answer to no frame is passed over."""
        for message in answers:
            with self._lock:
                waiting = self._waiting.pop(int.from_bytes(message[:_NUMBER_BYTES], "big"), None)
            if waiting is not None:
                waiting.set_result(message[_NUMBER_BYTES:])

    def close(self) -> None:
        """End the stream; frames that wait for an answer are lost. Closing twice is harmless."""
        with self._lock:
            self._is_closed = True
            waiting, self._waiting = list(self._waiting.values()), {}
        self._questions.put(None)
        for answer in waiting:
            answer.set_exception(PeerLostError(f"{self._party}: its stream has ended"))
        self._hang_up()


def answer_questions(exchange: Callable[[Iterator[bytes]], Iterable[bytes]], handle: Callable[[bytes], bytes]) -> None:
    """Be the dialling party's end of one stream, until it breaks.

    Args:
        exchange: Opens the stream: takes the answers, and returns the frames.
        handle: Returns the answer to one frame.
    """
    answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    try:
        for question in exchange(iter(answers.get, None)):
            answers.put(question[:_NUMBER_BYTES] + handle(question[_NUMBER_BYTES:]))
    finally:
        answers.put(None)
