"""A client's end of a session: it sends microbatches, keeps them until they are taken, and reads the feedback."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from phalanx.engine import NO_EXTRAS
from phalanx.errors import FrameError, PeerRefusedError
from phalanx.split.channel import messages as say
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.link import REFUSALS
from phalanx.split.channel.resend_window import TRIES, SendWindow
from phalanx.split.channel.tensor_kinds import TensorKinds, What
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.roles.client import Feedback, SplitClient
from phalanx.split.training.classification import HeldOutScores
from phalanx.split.training.parts import Front
from phalanx.telemetry import PhaseTimer

_Read = TypeVar("_Read", Feedback, HeldOutScores)


def _do_nothing() -> None:
    """Do nothing while waiting."""


class ClientEnd:
    """One client's end, in a process of its own or beside others.

    Args:
        party: Has met the enclave before the first microbatch.
        front: May be shared by the clients of one process: it is frozen.

    Attributes:
        enclave_costs: The enclave's, as it told them last.
        side: Makes and reads frames; None before the client has met the enclave.
    """

    def __init__(self, party: EnclavePeer, front: Front, kinds: TensorKinds, timer: PhaseTimer) -> None:
        self._party, self._front, self._kinds, self._timer = party, front, kinds, timer
        self._sending = SendWindow(party.name, party.connection.send_packed)
        self.enclave_costs = Costs()
        self.side: SplitClient | None = None

    def meet_enclave(self) -> None:
        """Appraise the enclave, and agree on keys with it."""
        self._party.meet_enclave()
        self.side = SplitClient(self._party.name, self._front, self._kinds, self._party.tensor_link)

    def send_microbatch(
        self,
        what: What,
        step: int,
        number: int,
        ids: Tensor,
        labels: Tensor,
        extras: Mapping[str, Tensor] = NO_EXTRAS,
    ) -> None:
        """Run the front on a microbatch and send what leaves."""
        with self._timer.time_phase("front"):
            packed = self._split_client.pack_microbatch(what, step, number, ids, labels, extras)
        with self._timer.time_phase("send"):
            self._sending.send_frames(say.Upload(what=what, microbatch=number, rows=packed.rows), packed.frames)

    def await_losses(self, step: int, mine: Sequence[int], meanwhile: Callable[[], None] = _do_nothing) -> Feedback:
        """Wait for the enclave's feedback on this client's microbatches of a step."""
        side = self._split_client
        return self._await_feedback(
            lambda frame: side.read_feedback(frame, "train", step, mine[-1], len(mine)), meanwhile
        )

    def await_scores(
        self, step: int, number: int, rows: int, meanwhile: Callable[[], None] = _do_nothing
    ) -> HeldOutScores:
        """Wait for the enclave's feedback on held-out rows; raises as `losses`."""
        side = self._split_client
        return self._await_feedback(lambda frame: side.read_scores(frame, step, number, rows), meanwhile)

    def resend_requested(self) -> None:
        """Send frames again that the enclave has refused and asks for."""
        asked = self._party.connection.peek_message(say.ResendRequest)
        if asked is not None:
            self._sending.resend_frames(asked)

    @property
    def _split_client(self) -> SplitClient:
        if self.side is None:
            raise PeerRefusedError(f"{self._party.name}: has not met the enclave yet")
        return self.side

    def _await_feedback(self, read: Callable[[memoryview], _Read], meanwhile: Callable[[], None]) -> _Read:
        """What the enclave says of microbatches; a reply that does not open is asked for again."""
        for attempt in range(TRIES):
            frame = self._await_reply(meanwhile)
            try:
                with self._timer.time_phase("open"):
                    feedback = read(frame)
            except REFUSALS:
                if attempt == TRIES - 1:
                    raise
                self._party.connection.send_message(say.RepeatRequest())
            else:
                self._sending.note_taken()
                return feedback
        raise FrameError(f"{self._party.name}: no reply opened")

    def _await_reply(self, meanwhile: Callable[[], None]) -> memoryview:
        with self._timer.time_phase("wait"):
            while True:
                answer, frame = self._party.connection.await_one_of((say.Reply, say.ResendRequest), meanwhile)
                if isinstance(answer, say.Reply):
                    self.enclave_costs = answer.costs
                    return frame
                if isinstance(answer, say.ResendRequest):
                    self._sending.resend_frames(answer)
