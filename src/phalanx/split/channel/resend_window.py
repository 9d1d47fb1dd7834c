"""Windows of microbatch frames at both ends of a line: waiting frames, repetitions after refusals, bounds."""

from collections import deque
from collections.abc import Callable, Sequence

from phalanx.errors import FrameError
from phalanx.split.channel import messages as say
from phalanx.split.channel.link import PackedFrame
from phalanx.transport import CheckedFrame

TRIES = 3
"""How often a frame is sent before the session ends."""


class ReceiveWindow:
    """The enclave's window: one client's frames that are not due yet, and how many of them were taken.

    After a refusal the client sends everything again from the refused frame on, the same bytes, as a new attempt. What
    was on its way before it heard of that is of an earlier attempt, and is dropped.
    """

    def __init__(self, client: str, most: int) -> None:
        self._client, self._max_waiting = client, most
        self._queue: deque[tuple[say.Upload, CheckedFrame]] = deque()
        self._taken = self._attempt = self._refused = 0

    def add_frame(self, message: say.Upload, frame: CheckedFrame) -> None:
        """Keep a frame until it is due."""
        if message.attempt < self._attempt:
            return
        if message.attempt > self._attempt:
            raise FrameError(f"{self._client}: resent a frame that was not refused")
        if len(self._queue) >= self._max_waiting:
            raise FrameError(
                f"{self._client}: {self._max_waiting} frames are waiting, the maximum of a step; wait for feedback"
            )
        self._queue.append((message, frame))

    @property
    def oldest_upload(self) -> say.Upload | None:
        """What is said of the oldest frame; None where none waits."""
        return self._queue[0][0] if self._queue else None

    def pop_frame(self) -> tuple[say.Upload, CheckedFrame]:
        """Take the oldest frame out."""
        return self._queue.popleft()

    def note_opened(self) -> None:
        """The frame that was taken out last has opened."""
        self._taken += 1
        self._refused = 0

    def refuse_frame(self) -> say.ResendRequest | None:
        """The frame that was taken out last was refused: what to ask the client for; None after too many tries."""
        self._queue.clear()
        self._refused += 1
        # given up or not, what was sent behind the refused frame is void
        self._attempt += 1
        return None if self._refused >= TRIES else say.ResendRequest(taken=self._taken, attempt=self._attempt)

    def drop_waiting(self) -> None:
        """Drop what waits."""
        self._queue.clear()

    def reset_window(self) -> None:
        """The client has met the enclave anew, and counts from nothing."""
        self._queue.clear()
        self._taken = self._attempt = self._refused = 0


class SendWindow:
    """A client's window: the frames of the step under way, until the feedback says that they were taken."""

    def __init__(self, name: str, post: Callable[[say.Upload, PackedFrame], None]) -> None:
        self._name, self._post = name, post
        self._kept: list[tuple[say.Upload, PackedFrame]] = []
        self._settled = self._attempt = 0
        self._asked_for, self._times_asked = 0, 0

    def send_frames(self, message: say.Upload, frames: Sequence[PackedFrame]) -> None:
        """Send the frames of a microbatch, and keep them."""
        for frame in frames:
            sent_frame = (message.model_copy(update={"attempt": self._attempt}), frame)
            self._kept.append(sent_frame)
            self._post(*sent_frame)

    def note_taken(self) -> None:
        """All that was sent has been taken."""
        self._settled += len(self._kept)
        self._kept.clear()

    def resend_frames(self, asked: say.ResendRequest) -> None:
        """Send the same bytes again, from the refused frame on.

        Raises:
            FrameError: The enclave asks for frames that were never sent, or too often.
        """
        first = asked.taken - self._settled
        # frames are taken in order: an enclave that asks for an earlier one than before only delays
        is_back = asked.taken < self._asked_for
        if is_back or asked.attempt != self._attempt + 1 or not 0 <= first < len(self._kept):
            raise FrameError(
                f"{self._name}: the enclave asks for frame {asked.taken} again, which is none of this step"
            )
        self._times_asked = self._times_asked + 1 if asked.taken == self._asked_for else 1
        self._asked_for = asked.taken
        if self._times_asked >= TRIES:
            raise FrameError(f"{self._name}: the enclave asks for frame {asked.taken} again and again")
        self._attempt = asked.attempt
        for message, frame in self._kept[first:]:
            self._post(message.model_copy(update={"attempt": self._attempt}), frame)
