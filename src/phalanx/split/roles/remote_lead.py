"""The owner of a split with clients of other owners: it asks for turns, and gets sums over all of them."""

import math
import time
from collections.abc import Mapping, Sequence

from phalanx.errors import FailedBatchError, FrameError
from phalanx.security.crypto import Peer
from phalanx.split.channel import messages as say
from phalanx.split.channel import turn_messages as ask
from phalanx.split.channel.costs import Costs
from phalanx.split.channel.tensor_kinds import TensorKinds, What
from phalanx.split.config import SplitConfig
from phalanx.split.handshake.party import EnclavePeer
from phalanx.split.roles.driver import SplitStep
from phalanx.split.roles.owner_requests import OwnerRequests
from phalanx.telemetry import PhaseTimer

_STEP_NUMBERS = 3
_CLASS_NUMBERS = 3


class ScoreTotals:
    """Held-out scores over all clients.

    Attributes:
        classes: For each class: its texts, the texts that were taken for it, and the right ones; empty of a language
            model.
        pair_sums: Sums over pairs, which `HeldOutScores` describes.
    """

    def __init__(self, numbers: Sequence[float], num_pair_sums: int = 0) -> None:
        self.loss, self.targets = numbers[0], _check_count(numbers[1])
        num_counts = len(numbers) - num_pair_sums
        self.pair_sums = tuple(numbers[num_counts:])
        if not all(map(math.isfinite, self.pair_sums)):
            raise FrameError(
                f"held-out scores: sums over pairs are {self.pair_sums}, which are no sums; [split.admission] leaves "
                "out a client that sends no numbers"
            )
        if self.pair_sums and _check_count(self.pair_sums[0]) > 2 * self.targets:
            raise FrameError(
                f"held-out scores: {self.pair_sums[0]:g} halves of {self.targets} pairs are ordered rightly, which "
                "is no sum"
            )
        counts = [_check_count(number) for number in numbers[2:num_counts]]
        self.classes = tuple(
            (counts[index], counts[index + 1], counts[index + 2]) for index in range(0, len(counts), _CLASS_NUMBERS)
        )
        if not self.classes:
            if not self.loss >= 0 or not self.targets:
                raise FrameError(
                    f"held-out scores: loss {self.loss} of {self.targets} tokens, which is no sum; [split.admission] "
                    "leaves out a client that sends no numbers"
                )
            return
        true, predicted, right = (sum(column) for column in zip(*self.classes, strict=True))
        impossible = any(good > min(of_it, taken) for of_it, taken, good in self.classes)
        is_sum = true == predicted == self.targets and right <= true and self.loss >= 0 and self.targets
        if impossible or not is_sum:
            raise FrameError(
                f"held-out scores: loss {self.loss} of {self.targets} texts, {true} of a class, {predicted} taken for "
                "one: no sum; [split.admission] leaves out a client that sends no numbers"
            )


class RemoteLead(OwnerRequests):
    """The owner of clients that are processes of others.

    Args:
        split: The section of the run file.
        num_classes: Number of classes of a classification; 0 of a language model.
        num_pair_sums: Number of sums over pairs in a measurement.

    Attributes:
        timer: Phases of the steps, as the owner sees them.
        commitments: Commitments to each client's data; a claim of the client.
    """

    def __init__(self, split: SplitConfig, owner: EnclavePeer, num_classes: int, num_pair_sums: int = 0) -> None:
        super().__init__(owner)
        self.timer = PhaseTimer()
        self.commitments: Mapping[str, str] = {}
        self._split, self._num_classes, self._num_pair_sums = split, num_classes, num_pair_sums
        self._enclave_costs = Costs()

    @property
    def enclave_peers(self) -> tuple[EnclavePeer, ...]:
        """The owner: what others have appraised is theirs to tell."""
        return (self._owner,)

    @property
    def process_costs(self) -> Costs:
        """CPU time of this process and of the enclave's so far, as far as the enclave has told."""
        mine = self._owner.connection.transport_costs.add_costs(
            Costs(meeting_s=self._owner.meeting_s, cpu_s=time.process_time())
        )
        return self._enclave_costs.add_costs(mine)

    @property
    def bytes_crossed(self) -> Mapping[str, int]:
        """Return the bytes on the owner's line so far, both ways; clients count their own lines."""
        return {self._owner.name: self._owner.connection.bytes_crossed}

    def take_client_phases(self) -> dict[str, dict[str, float]]:
        """Return nothing: clients of others take their time elsewhere."""
        return {}

    def meet_enclave(self) -> None:
        """Wait until every party has called the enclave, appraise it, and wait until all clients have done the same."""
        self._owner.connection.await_message(say.EnclaveReady)
        self._owner.meet_enclave()
        ready, _ = self._owner.connection.await_message(ask.ClientsReady)
        if tuple(sorted(ready.data)) != tuple(sorted(self._split.client_names)):
            raise FrameError(f"{len(ready.data)} clients are ready, but differ from those of the run file")
        self.commitments = ready.data

    def train_step(self, step: int, draw: int) -> SplitStep:
        """Have all clients train one step.

        Raises:
            RefusedEvidenceError: The enclave is not trusted any more; no turn was asked for.
            FailedBatchError: Loss or gradient is not finite; nothing was applied.
        """
        with self.timer.time_phase("attest"):
            self._owner.check_trust(every_s=self._split.reattest_s, now=self._split.reattests_at(step))
        norm, loss, targets = self._request_turn("train", step, draw, _STEP_NUMBERS)
        if not norm >= 0:
            raise FailedBatchError(f"step {step}: the enclave computed a loss or gradient that is not finite")
        count = _check_count(targets)
        if not count:
            raise FrameError(f"step {step}: the enclave counts no target of a step that it took")
        return SplitStep(loss / count, count, norm)

    def request_scores(self, step: int) -> ScoreTotals:
        """Have all clients measure their held-out texts after so many finished steps; raises as `step`."""
        num_numbers = 2 + _CLASS_NUMBERS * self._num_classes + self._num_pair_sums
        return ScoreTotals(self._request_turn("held_out", step, 0, num_numbers), self._num_pair_sums)

    def compare_transcripts(self, enclave: Peer) -> dict[str, tuple[bytes, bytes]]:
        """Have all clients compare transcripts with the enclave, and compare the owner's here.

        Returns:
            Both ends' signed statements on the owner's line; clients keep their own.
        """
        self._owner.connection.request_answer(ask.Conclude(), ask.ConcludeReply)
        statements = self._owner.compare_transcripts(enclave)
        return {} if statements is None else {self._owner.name: statements}

    def close(self) -> None:
        """Forget keys."""
        self._owner.close()

    def _request_turn(self, what: What, step: int, draw: int, numbers: int) -> list[float]:
        with self.timer.time_phase("wait"):
            turn_total, frame = self._owner.connection.request_answer(
                ask.ClientTurn(what=what, step=step, draw=draw), ask.TurnTotal
            )
        if (turn_total.what, turn_total.step) != (what, step):
            raise FrameError(
                f"the enclave reported {turn_total.what} at step {turn_total.step}, but {what} at {step} was requested"
            )
        self._enclave_costs = turn_total.costs
        with self.timer.time_phase("open"):
            total: list[float] = self._owner.tensor_link.unpack_tensor(
                frame, TensorKinds.total_kind(what, numbers), step, 0
            ).tolist()
        return total


def _check_count(number: float) -> int:
    if not (number >= 0 and number.is_integer()):
        raise FrameError(f"the enclave counts {number}, which is no count")
    return int(number)
