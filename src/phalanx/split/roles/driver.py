"""All parties outside the enclave, played by one process: they send microbatches, and put losses together."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from torch import Tensor

from phalanx.engine import GuardReport, StepInputs
from phalanx.errors import FailedBatchError, FrameError
from phalanx.security.crypto import Peer
from phalanx.split.channel import messages as say
from phalanx.split.channel.connection import Connection
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.link import REFUSALS, costs_of
from phalanx.split.channel.packed import PackedFrame
from phalanx.split.channel.resend_window import TRIES, SendWindow
from phalanx.split.channel.tensor_kinds import TensorKinds, What
from phalanx.split.config import SplitConfig
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.roles.client import Feedback, SplitClient, client_of, microbatches_of
from phalanx.split.training.measured import HeldOutScores
from phalanx.split.training.parts import FrontPart
from phalanx.telemetry import PhaseTimer

_Read = TypeVar("_Read", Feedback, HeldOutScores)


@dataclass(frozen=True)
class SplitStep:
    """The result of one step.

    Attributes:
        loss: Mean over all targets.
        num_targets: How many there were.
        norm: Of the gradient, before clipping.
        guard: What the guard of middle stages did; None where the enclave has them itself.
    """

    loss: float
    num_targets: int
    norm: float
    guard: GuardReport | None = None


class SplitDriver:
    """The driver of clients and owner.

    Args:
        split: The section of the run file.
        owner: Keeps sealed states and asks for the release.
        clients: In the order of their turns.
        front: Of all clients: it is frozen.
        kinds: What crosses.
        microbatches: Of a step.

    Attributes:
        timer: Phases of the steps, as this process sees them.
    """

    def __init__(
        self,
        split: SplitConfig,
        owner: EnclavePeer,
        clients: Sequence[EnclavePeer],
        front: FrontPart,
        kinds: TensorKinds,
        microbatches: int,
    ) -> None:
        self.timer = PhaseTimer()
        self._split, self._owner, self._clients = split, owner, tuple(clients)
        self._front, self._kinds, self._microbatches = front, kinds, microbatches
        self._parties = {party.name: party for party in clients}
        self._sides: dict[str, SplitClient] = {}
        self._sending = {party.name: SendWindow(party.name, _post_over(party.line)) for party in clients}
        self._enclave_costs = Costs()

    @property
    def parties(self) -> tuple[EnclavePeer, ...]:
        """The owner, then the clients."""
        return (self._owner, *self._clients)

    @property
    def costs(self) -> Costs:
        """CPU time of both processes so far, as far as the enclave has told."""
        total = self._enclave_costs.plus(costs_of(party.link for party in self._clients))
        for party in self.parties:
            total = total.plus(party.line.costs).plus(Costs(meeting_s=party.meeting_s))
        return total.plus(Costs(cpu_s=time.process_time()))

    @property
    def bytes_crossed(self) -> Mapping[str, int]:
        """Bytes on each client's line so far, both ways."""
        return {party.name: party.line.bytes_crossed for party in self._clients}

    def meet(self) -> None:
        """Have every party wait for the enclave, appraise it and agree on keys with it.

        Raises:
            PhalanxError: As `EnclavePeer.meet`; nothing was sent to an enclave that did not pass.
        """
        for party in self.parties:
            ready, _ = party.line.hear(say.EnclaveReady)
            party.line.meet_at(ready.address)
            party.meet()
        self._sides = {
            party.name: SplitClient(party.name, self._front, self._kinds, party.link) for party in self._clients
        }

    def step(self, step: int, inputs: StepInputs) -> SplitStep:
        """Train one step.

        Raises:
            RefusedEvidenceError: The enclave is not trusted any more; nothing of the step was sent.
            FailedBatchError: Loss or gradient is not finite; nothing was applied.
            PhalanxError: As `Connection.hear`.
        """
        self._check_trust(step)
        for number in range(len(inputs.ids)):
            self._send("train", step, number, client_of(number, self._split.client_names), inputs)
        losses: dict[int, tuple[float, int]] = {}
        norm = 0.0
        for party in self._clients:
            mine = microbatches_of(party.name, self._microbatches, self._split.client_names)
            told = self._told(party, _reading_losses(self._sides[party.name], step, mine))
            norm = told.norm
            losses.update(zip(mine, told.losses, strict=True))
        guard = self._hear_of_guard() if self._split.workers_see_hidden_states else None
        if not norm >= 0:
            raise FailedBatchError(f"step {step}: the enclave found a loss or gradient that is not finite")
        in_order = [losses[number] for number in sorted(losses)]
        targets = sum(count for _, count in in_order)
        return SplitStep(sum(loss for loss, _ in in_order) / targets, targets, norm, guard)

    def measure(
        self, step: int, batches: Iterator[tuple[Tensor, Tensor]], senders: Sequence[str] = ()
    ) -> HeldOutScores:
        """Return what held-out rows come to, with answers in their order.

        Args:
            step: Finished steps.
            batches: Ids and labels.
            senders: The client that sends each of them; clients take turns when left out.

        Raises:
            PhalanxError: As `Connection.hear`.
        """
        losses: list[float] = []
        count = 0
        answers: list[int] = []
        for number, (ids, labels) in enumerate(batches):
            name = senders[number] if senders else client_of(number, self._split.client_names)
            party = self._parties[name]
            self._send("held_out", step, number, party.name, StepInputs((ids,), (labels,), 0))
            told = self._told(party, _reading_measured(self._sides[party.name], step, number, ids.shape[0]))
            losses.append(told.loss)
            count += told.targets
            answers += told.answers
        # exact, so that it does not matter in which order clients are measured
        return HeldOutScores(math.fsum(losses), count, tuple(answers))

    # --- what the owner asks for ------------------------------------------------------------------

    def restore(self, step: int, blob: memoryview) -> None:
        """Have the enclave go on from a sealed state.

        Raises:
            RollbackError: It is older than one that is known to be kept.
            CheckpointError: It is altered, or another run's.
        """
        self._owner.line.ask(say.Restore(step=step), say.RestoreReply, (blob,))

    def keep(self) -> tuple[int, int, memoryview]:
        """Return finished steps, number and bytes of the sealed state."""
        kept, blob = self._owner.line.ask(say.Keep(), say.SealedState)
        return kept.step, kept.number, blob

    def settle(self, number: int) -> None:
        """A sealed state is safe: the ones before it are void."""
        self._owner.line.ask(say.Settle(number=number), say.SettleReply)

    def weigh(self) -> str:
        """Return the digest of the weights."""
        weighed, _ = self._owner.line.ask(say.Weigh(), say.WeightsReply)
        return weighed.digest

    def release(self, step: int) -> tuple[dict[str, object], dict[str, Tensor]]:
        """Return what was permitted, and the adapters.

        Raises:
            ReleaseRefusedError: They stay sealed.
        """
        self._owner.line.say(say.AskRelease())
        tensors: dict[str, Tensor] = {}
        while True:
            message, frame = self._owner.line.hear_one_of((say.ReleasePart, say.ReleaseEnd))
            if isinstance(message, say.ReleasePart):
                kind = TensorKinds.adapter(message.name, message.shape)
                tensors[message.name] = self._owner.link.unpack(frame, kind, step, len(tensors))
            elif isinstance(message, say.ReleaseEnd):
                return message.release.model_dump(), tensors

    def compare_transcripts(self, enclave: Peer) -> dict[str, tuple[bytes, bytes]]:
        """Return both ends' signed statements by party, all of which agree.

        Raises:
            TranscriptError: Two of them do not.
        """
        found = {party.name: party.compare_transcripts(enclave) for party in self.parties}
        return {name: both for name, both in found.items() if both is not None}

    def end(self) -> None:
        """The session is over."""
        self._owner.line.say(say.End())
        self._owner.line.flush()

    def close(self) -> None:
        """Forget keys."""
        for party in self.parties:
            party.close()

    def _check_trust(self, step: int) -> None:
        every = self._split.reattest_every
        is_time = bool(every and step and step % every == 0)
        with self.timer.phase("attest"):
            for party in self.parties:
                party.check_trust(every_s=self._split.reattest_s, now=is_time)

    def _send(self, what: What, step: int, number: int, name: str, inputs: StepInputs) -> None:
        side, at = self._sides[name], number if what == "train" else 0
        with self.timer.phase("front"):
            packed = side.pack(what, step, number, inputs.ids[at], inputs.labels[at], inputs.extras_of(at))
        with self.timer.phase("send"):
            self._sending[name].send(say.Upload(what=what, microbatch=number, rows=packed.rows), packed.frames)

    def _told(self, party: EnclavePeer, read: Callable[[memoryview], _Read]) -> _Read:
        """What the enclave says of a party's microbatches; a reply that does not open is asked for again."""
        for attempt in range(TRIES):
            frame = self._hear(party)
            try:
                with self.timer.phase("open"):
                    told = read(frame)
            except REFUSALS:
                if attempt == TRIES - 1:
                    raise
                party.line.say(say.Repeat())
            else:
                self._sending[party.name].settle()
                return told
        raise FrameError(f"{party.name}: no reply opened")

    def _hear(self, party: EnclavePeer) -> memoryview:
        with self.timer.phase("wait"):
            while True:
                said, frame = party.line.hear_one_of(
                    (say.Reply, say.ResendRequest), self._send_what_others_are_asked_for
                )
                if isinstance(said, say.Reply):
                    self._enclave_costs = said.costs
                    return frame
                if isinstance(said, say.ResendRequest):
                    self._sending[party.name].send_again(said)

    def _hear_of_guard(self) -> GuardReport:
        with self.timer.phase("wait"):
            told, _ = self._owner.line.hear(say.GuardedStep)
        return GuardReport(**{one.name: getattr(told, one.name) for one in fields(GuardReport)})

    def _send_what_others_are_asked_for(self) -> None:
        """One client's reply waits for every client's frames, and for what the enclave asks of the owner meanwhile."""
        self._owner.line.heed()
        for party in self._clients:
            asked = party.line.glance(say.ResendRequest)
            if asked is not None:
                self._sending[party.name].send_again(asked)


def _reading_losses(side: SplitClient, step: int, mine: Sequence[int]) -> Callable[[memoryview], Feedback]:
    return lambda frame: side.read(frame, "train", step, mine[-1], len(mine))


def _reading_measured(side: SplitClient, step: int, number: int, rows: int) -> Callable[[memoryview], HeldOutScores]:
    return lambda frame: side.read_measured(frame, step, number, rows)


def _post_over(line: Connection) -> Callable[[say.Upload, PackedFrame], None]:
    return line.say_packed
