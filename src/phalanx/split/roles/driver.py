"""All parties outside the enclave, played by one process: they send microbatches, and put losses together."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from torch import Tensor

from phalanx.data import without_attention
from phalanx.engine import GuardReport, StepInputs
from phalanx.errors import FailedBatchError
from phalanx.models import with_marks
from phalanx.security.crypto import Peer
from phalanx.split.channel import messages as say
from phalanx.split.channel.client_order import client_of, microbatches_of
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.link import costs_of
from phalanx.split.channel.tensor_kinds import TensorKinds, What
from phalanx.split.config import SplitConfig
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.roles.client_end import ClientEnd
from phalanx.split.roles.owner_requests import OwnerRequests
from phalanx.split.training.classification import HeldOutScores
from phalanx.split.training.parts import Front
from phalanx.telemetry import PhaseTimer


@dataclass(frozen=True)
class SplitStep:
    """The result of one step.

    Attributes:
        guard: Report of the guard of middle stages; None where the enclave holds them itself.
    """

    loss: float
    num_targets: int
    norm: float
    guard: GuardReport | None = None


class SplitDriver(OwnerRequests):
    """The driver of clients and owner.

    Args:
        split: The section of the run file.
        owner: Keeps sealed states and asks for the release.
        clients: In the order of their turns.
        front: Frozen front part of all clients.

    Attributes:
        timer: Phases of the steps that are no single client's.
    """

    def __init__(
        self,
        split: SplitConfig,
        owner: EnclavePeer,
        clients: Sequence[EnclavePeer],
        front: Front,
        kinds: TensorKinds,
        microbatches: int,
    ) -> None:
        super().__init__(owner)
        self.timer = PhaseTimer()
        self._split, self._clients, self._microbatches = split, tuple(clients), microbatches
        self._timers = {party.name: PhaseTimer() for party in clients}
        self._ends = {party.name: ClientEnd(party, front, kinds, self._timers[party.name]) for party in clients}

    @property
    def enclave_peers(self) -> tuple[EnclavePeer, ...]:
        """The owner, then the clients."""
        return (self._owner, *self._clients)

    @property
    def process_costs(self) -> Costs:
        """CPU time of both processes so far, as far as the enclave has told."""
        heard = max((client_end.enclave_costs for client_end in self._ends.values()), key=lambda one: one.cpu_s)
        total = heard.add_costs(costs_of(party.tensor_link for party in self._clients))
        for party in self.enclave_peers:
            total = total.add_costs(party.connection.transport_costs).add_costs(Costs(meeting_s=party.meeting_s))
        return total.add_costs(Costs(cpu_s=time.process_time()))

    @property
    def bytes_crossed(self) -> Mapping[str, int]:
        """Bytes on each client's line so far, both ways."""
        return {party.name: party.connection.bytes_crossed for party in self._clients}

    def take_client_phases(self) -> dict[str, dict[str, float]]:
        """Return each client's wall seconds by phase since the last call, as this process has measured them."""
        return {name: timer.take_wall() for name, timer in self._timers.items()}

    def meet_enclave(self) -> None:
        """Have every party wait for the enclave, appraise it and agree on keys with it.

        Raises:
            PhalanxError: As `EnclavePeer.meet_enclave`; nothing was sent to an enclave that did not pass.
        """
        for party in self.enclave_peers:
            ready, _ = party.connection.await_message(say.EnclaveReady)
            party.connection.set_enclave_address(ready.address)
            self._ends.get(party.name, party).meet_enclave()

    def train_step(self, step: int, inputs: StepInputs) -> SplitStep:
        """Train one step.

        Raises:
            RefusedEvidenceError: The enclave is not trusted any more; nothing of the step was sent.
            FailedBatchError: Loss or gradient is not finite; nothing was applied.
        """
        self._check_trust(step)
        for number in range(len(inputs.ids)):
            self._send_microbatch("train", step, number, client_of(number, self._split.client_names), inputs)
        losses: dict[int, tuple[float, int]] = {}
        norm = 0.0
        for name, client_end in self._ends.items():
            mine = microbatches_of(name, self._microbatches, self._split.client_names)
            feedback = client_end.await_losses(step, mine, self._resend_requested)
            norm = feedback.norm
            losses.update(zip(mine, feedback.losses, strict=True))
        guard = self._receive_guard_events() if self._split.workers_see_hidden_states else None
        if not norm >= 0:
            raise FailedBatchError(f"step {step}: the enclave computed a loss or gradient that is not finite")
        in_order = [losses[number] for number in sorted(losses)]
        targets = sum(count for _, count in in_order)
        return SplitStep(sum(loss for loss, _ in in_order) / targets, targets, norm, guard)

    def measure_held_out(
        self,
        step: int,
        batches: Iterator[tuple[Tensor, Tensor]],
        senders: Sequence[str] = (),
        extras: Sequence[Mapping[str, Tensor]] = (),
    ) -> HeldOutScores:
        """Return what held-out rows come to, with answers in their order.

        Args:
            senders: The client that sends each of them; clients take turns when left out.
            extras: More rows of each of them, as the objective reads them.
        """
        losses: list[float] = []
        count = 0
        answers: list[int] = []
        pair_sums: list[tuple[float, ...]] = []
        for number, (ids, labels) in enumerate(batches):
            name = senders[number] if senders else client_of(number, self._split.client_names)
            more = (extras[number],) if extras else ()
            self._send_microbatch("held_out", step, number, name, StepInputs((ids,), (labels,), 0, more))
            scores = self._ends[name].await_scores(step, number, ids.shape[0], self._resend_requested)
            losses.append(scores.loss)
            count += scores.targets
            answers += scores.answers
            pair_sums.append(scores.pair_sums)
        # exact, so that it does not matter in which order clients are measured
        totals = tuple(math.fsum(column) for column in zip(*pair_sums, strict=True))
        return HeldOutScores(math.fsum(losses), count, tuple(answers), totals)

    # --- the end -----------------------------------------------------------------------------------

    def compare_transcripts(self, enclave: Peer) -> dict[str, tuple[bytes, bytes]]:
        """Return both ends' signed statements by party, all of which agree."""
        comparisons = {party.name: party.compare_transcripts(enclave) for party in self.enclave_peers}
        return {name: statements for name, statements in comparisons.items() if statements is not None}

    def close(self) -> None:
        """Forget keys."""
        for party in self.enclave_peers:
            party.close()

    def _check_trust(self, step: int) -> None:
        is_time = self._split.reattests_at(step)
        with self.timer.time_phase("attest"):
            for party in self.enclave_peers:
                party.check_trust(every_s=self._split.reattest_s, now=is_time)

    def _send_microbatch(self, what: What, step: int, number: int, name: str, inputs: StepInputs) -> None:
        row_number = number if what == "train" else 0
        extras = inputs.extras_of(row_number)
        ids = with_marks(inputs.ids[row_number], extras)
        self._ends[name].send_microbatch(what, step, number, ids, inputs.labels[row_number], without_attention(extras))

    def _receive_guard_events(self) -> GuardReport:
        with self.timer.time_phase("wait"):
            report, _ = self._owner.connection.await_message(say.GuardedStep)
        return GuardReport(**{field.name: getattr(report, field.name) for field in fields(GuardReport)})

    def _resend_requested(self) -> None:
        """One client's reply waits for every client's frames, and for the enclave's requests to the owner meanwhile."""
        self._owner.connection.handle_unrequested()
        for client_end in self._ends.values():
            client_end.resend_requested()
