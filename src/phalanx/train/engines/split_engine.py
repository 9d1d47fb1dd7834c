"""The loop's Engine over clients and an enclave."""

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.checkpoint import Checkpoint, Shard
from phalanx.data import IGNORE, Batch
from phalanx.engine import StepInputs, StepResult
from phalanx.errors import CheckpointError, ConfigError
from phalanx.models import with_marks
from phalanx.split import SplitDriver, SplitStep
from phalanx.split.channel.costs import Costs
from phalanx.split.roles.remote_lead import RemoteLead
from phalanx.telemetry import PhaseTimer
from phalanx.train.batches.preferences import PreferenceScores
from phalanx.train.batches.remote_turns import RemoteTurns
from phalanx.train.batches.scores import Scores, Validation
from phalanx.train.batches.validation import perplexity_of
from phalanx.transport.tensors import tensor_buffers

Rows = tuple[Tensor, Tensor]
"""Ids, with the borders of documents where there are any, and labels."""

_SEALED = "sealed"
_RECENT = 1000
"""Number of latest steps of which the costs are kept for a median."""


class SplitLead(Protocol):
    """The owner's side of a split, as far as the loop's engine needs it."""

    timer: PhaseTimer

    @property
    def process_costs(self) -> Costs:
        """CPU time so far."""

    @property
    def bytes_crossed(self) -> Mapping[str, int]:
        """Bytes on each line so far, both ways."""

    def take_client_phases(self) -> dict[str, dict[str, float]]:
        """Return each client's wall seconds by phase since the last call, where this process has measured them."""
        ...

    def request_state(self) -> tuple[int, int, memoryview]:
        """Return finished steps, number and bytes of the sealed state."""

    def settle_state(self, number: int) -> None:
        """A sealed state is safe: the ones before it are void."""

    def restore_state(self, step: int, blob: memoryview) -> None:
        """Have the enclave go on from a sealed state."""


class ClientWork(Protocol):
    """The clients' part of a step and of a measurement, wherever they are."""

    def train_turn(self, step: int, inputs: StepInputs) -> tuple[SplitStep, str]:
        """Train one step; return its result, and the identity of its batch."""

    def measure_turn(self, step: int, batches: Iterable[Batch]) -> Validation:
        """Measure held-out rows after so many finished steps."""

    def sum_losses(self, step: int, batch: Batch) -> float:
        """Sum of nats of rows that are nobody's secret."""


class LocalClients:
    """Clients that are all played by this process.

    Args:
        num_classes: Number of classes of a classification; 0 of any other task.
        holders: The client that has each held-out row; clients take turns with them when left out.
        learns_pairs: Whether rows are pairs of answers, each with what its objective reads beside them.
    """

    def __init__(
        self, lead: SplitDriver, num_classes: int = 0, holders: Sequence[str] = (), *, learns_pairs: bool = False
    ) -> None:
        self._lead, self._num_classes, self._holders = lead, num_classes, tuple(holders)
        self._learns_pairs = learns_pairs

    def train_turn(self, step: int, inputs: StepInputs) -> tuple[SplitStep, str]:
        """As `ClientWork` says; the batch is named by its digest."""
        return self._lead.train_step(step, inputs), inputs.batch_digest()

    def measure_turn(self, step: int, batches: Iterable[Batch]) -> Validation:
        """Perplexity on held-out batches, infinity when it overflows; of classes or pairs their scores."""
        kept_batches = list(batches)
        parts = [(with_marks(batch.input_ids, batch.extras), batch.labels) for batch in kept_batches]
        senders = list[str]()
        if self._holders:
            parts, senders = self._by_holder(parts)
        extras = [batch.extras for batch in kept_batches] if self._learns_pairs else ()
        total, count, answers, pair_sums = self._lead.measure_held_out(step, iter(parts), senders, extras)
        if pair_sums:
            return _pair_scores(total, count, pair_sums)
        if self._num_classes:
            true = [int(label) for batch in kept_batches for label in batch.labels[batch.labels != IGNORE]]
            return Scores.from_predictions(total, answers, true, self._num_classes)
        return perplexity_of(total, count)

    def sum_losses(self, step: int, batch: Batch) -> float:
        """As `ClientWork` says."""
        return self._lead.measure_held_out(step, iter([(batch.input_ids, batch.labels)])).loss

    def _by_holder(self, parts: Sequence[Rows]) -> tuple[list[Rows], list[str]]:
        """Cut held-out rows anew, so that no part has rows of two clients; return the parts and the client of each."""
        at_once = parts[0][0].shape[0]
        ids, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        cut, senders, start = list[Rows](), list[str](), 0
        for name, group in itertools.groupby(self._holders):
            end_row = start + len(list(group))
            for first_row in range(start, end_row, at_once):
                rows = slice(first_row, min(first_row + at_once, end_row))
                cut.append((ids[rows], labels[rows]))
                senders.append(name)
            start = end_row
        return cut, senders


def _pair_scores(loss: float, pairs: int, pair_sums: Sequence[float]) -> PreferenceScores:
    """Return scores of sums over pairs; of the divergence from the reference an enclave tells nothing."""
    ordered, margin = pair_sums
    return PreferenceScores(loss / pairs, ordered / (2 * pairs), margin / pairs, None)


class RemoteClients:
    """Clients that are processes of others and draw from their own texts.

    Args:
        check: Called with the step before each turn; raises where the run cannot go on.
    """

    def __init__(self, lead: RemoteLead, turns: RemoteTurns, check: Callable[[int], None] = lambda step: None) -> None:
        self._lead, self._turns, self._check = lead, turns, check

    def train_turn(self, step: int, inputs: StepInputs) -> tuple[SplitStep, str]:
        """As `ClientWork` says; the batch is named by the number of its draw: nothing else is known of it here."""
        del inputs
        self._check(step)
        draw = self._turns.drawn - 1
        return self._lead.train_step(step, draw), f"draw {draw}"

    def measure_turn(self, step: int, batches: Iterable[Batch]) -> Validation:
        """Scores, or perplexity, over the held-out texts of all clients."""
        del batches
        self._check(step)
        scores = self._lead.request_scores(step)
        if scores.pair_sums:
            return _pair_scores(scores.loss, scores.targets, scores.pair_sums)
        if not scores.classes:
            return perplexity_of(scores.loss, scores.targets)
        return Scores.from_counts(scores.loss, scores.classes)

    def sum_losses(self, step: int, batch: Batch) -> float:
        """Refuse: remote clients measure their own texts only."""
        raise ConfigError("split.remote_clients: remote clients measure their own texts only; remove [evaluate]")


class SplitEngine:
    """The loop's engine over clients and an enclave."""

    def __init__(self, lead: SplitLead, clients: ClientWork) -> None:
        self.costs = Costs()
        self._recent: deque[Costs] = deque(maxlen=_RECENT)
        self._lead, self._clients = lead, clients
        self._num_steps = 0
        self._to_settle = 0

    def train_turn(self, step: int, inputs: StepInputs) -> StepResult:
        """Run one optimizer step.

        Raises:
            RefusedEvidenceError: The enclave is not trusted any more; nothing of the step was sent.
            FailedBatchError: Loss or gradient is not finite; nothing was updated.
            PhalanxError: The enclave is gone, or refused a message.
        """
        lead = self._lead
        bytes_before, costs_before = lead.bytes_crossed, lead.process_costs
        outcome, batch = self._clients.train_turn(step, inputs)
        self._num_steps = step + 1
        self._recent.append(lead.process_costs.subtract_costs(costs_before))
        self.costs = self.costs.add_costs(self._recent[-1])
        phases, clients = lead.timer.take_wall(), lead.take_client_phases()
        for taken in clients.values():
            for name, seconds in taken.items():
                phases[name] = phases.get(name, 0.0) + seconds
        return StepResult(
            step=step,
            loss=outcome.loss,
            num_targets=outcome.num_targets,
            gradient_norm=outcome.norm,
            phases=phases,
            bytes_by_link={name: count - bytes_before[name] for name, count in lead.bytes_crossed.items()},
            batch=batch,
            guard=outcome.guard,
            party_phases={name: {"step": step, "seconds": taken, "measured": True} for name, taken in clients.items()},
        )

    def cost_facts(self) -> dict[str, Any]:
        """The costs of the steps, for the summary: in all, and the medians of the latest ones part by part."""
        names, recent = Costs._fields, tuple(self._recent)
        medians = (
            {name: statistics.median(getattr(record, name) for record in recent) for name in names} if recent else None
        )
        return {
            "crypto_s": self.costs.link_s,
            "cpu_s": self.costs.cpu_s,
            "meeting_s": self._lead.process_costs.meeting_s,
            "costs_of_a_step": medians,
        }

    def settle_steps(self) -> None:
        """Nothing of a finished step is under way."""

    @property
    def num_steps(self) -> int:
        """Finished steps."""
        return self._num_steps

    def measure_sets(self, sets: Sequence[Iterable[Batch]]) -> list[Validation]:
        """Measure the held-out rows of each set, as the clients have them."""
        return [self._clients.measure_turn(self._num_steps, batches) for batches in sets]

    def measure_rows(self, rows: Sequence[Batch]) -> list[float]:
        """Sum of nats of each row, which the first client sends as if it were held out."""
        return [self._clients.sum_losses(self._num_steps, row) for row in rows]

    def sealed_shards(self) -> Iterator[Shard]:
        """The enclave's state, sealed: bytes that only it can open."""
        step, number, blob = self._lead.request_state()
        self._to_settle = number
        yield Shard(0, {_SEALED: torch.frombuffer(bytearray(blob), dtype=torch.uint8)}, step)

    def confirm_sealed(self) -> None:
        """The last of the `shards` is safe on the disk."""
        self._lead.settle_state(self._to_settle)

    def load_sealed(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: It holds no sealed state, or one of another run.
            RollbackError: It holds one that is older than the newest that was kept.
        """
        if set(checkpoint.stages_by_tensor()) != {_SEALED}:
            raise CheckpointError(f"{checkpoint.path}: holds no sealed state; it belongs to another kind of run")
        self._lead.restore_state(checkpoint.step, tensor_buffers(checkpoint.read_tensor(_SEALED).contiguous()))
        self._num_steps = checkpoint.step
