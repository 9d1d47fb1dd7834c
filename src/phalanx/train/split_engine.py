"""The loop's Engine over clients and an enclave."""

import math
from collections.abc import Iterator

import torch

from phalanx.checkpoint import Checkpoint, Shard
from phalanx.data import IGNORE, Batch
from phalanx.errors import CheckpointError
from phalanx.pipeline import StepInputs, StepResult
from phalanx.split import SplitLead
from phalanx.train.scores import Scores, Validation
from phalanx.transport.tensors import tensor_buffers

_SEALED = "sealed"


class SplitEngine:
    """Turns what the loop has and wants into what clients and enclave understand.

    Args:
        lead: All parties outside the enclave.
        num_classes: Of a classification; 0 of anything else.

    Attributes:
        crypto_s: CPU seconds of sealing and opening in the steps so far, at both ends.
        cpu_s: CPU seconds of both processes in the steps so far.
    """

    def __init__(self, lead: SplitLead, num_classes: int = 0) -> None:
        self.crypto_s, self.cpu_s = 0.0, 0.0
        self._lead, self._num_classes = lead, num_classes
        self._num_steps = 0
        self._to_settle = 0

    def step(self, step: int, inputs: StepInputs) -> StepResult:
        """Run one optimizer step.

        Raises:
            RefusedEvidenceError: The enclave is not trusted any more; nothing of the step was sent.
            FailedBatchError: Loss or gradient is not finite; nothing was updated.
            PhalanxError: The enclave is gone, or refused what came.
        """
        lead = self._lead
        bytes_before, crypto_before, cpu_before = lead.bytes_crossed, lead.crypto_seconds, lead.cpu_seconds
        outcome = lead.step(step, inputs.ids, inputs.labels)
        self._num_steps = step + 1
        self.crypto_s += lead.crypto_seconds - crypto_before
        self.cpu_s += lead.cpu_seconds - cpu_before
        return StepResult(
            step=step,
            loss=outcome.loss,
            num_targets=outcome.num_targets,
            gradient_norm=outcome.norm,
            attempts=1,
            num_audits=0,
            num_alarms=0,
            verdicts=(),
            phases=lead.timer.take(),
            bytes_by_link={name: count - bytes_before[name] for name, count in lead.bytes_crossed.items()},
            batch=inputs.digest(),
        )

    def settle(self) -> None:
        """Nothing of a finished step is under way."""

    def measure(self, batches: Iterator[Batch]) -> Validation:
        """Perplexity on held-out batches, infinity when it overflows; of a classification its scores."""
        kept = list(batches)
        total, count, answers = self._lead.measure(self._num_steps, ((one.input_ids, one.labels) for one in kept))
        if self._num_classes:
            true = [int(label) for one in kept for label in one.labels[one.labels != IGNORE]]
            return Scores.of(total, answers, true, self._num_classes)
        return math.exp(total / count) if count and total / count < 700 else math.inf

    def shards(self) -> Iterator[Shard]:
        """The enclave's state, sealed: bytes that only it can open."""
        step, number, blob = self._lead.keep()
        self._to_settle = number
        yield Shard(0, {_SEALED: torch.frombuffer(bytearray(blob), dtype=torch.uint8)}, step)

    def kept(self) -> None:
        """The last of the `shards` is safe on the disk."""
        self._lead.settle(self._to_settle)

    def load(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: It holds no sealed state, or one of another run.
            RollbackError: It holds one that is older than the newest that was kept.
        """
        if set(checkpoint.names()) != {_SEALED}:
            raise CheckpointError(f"{checkpoint.path}: holds no sealed state; it is of a run of another kind")
        self._lead.restore(checkpoint.step, tensor_buffers(checkpoint.tensor(_SEALED).contiguous()))
        self._num_steps = checkpoint.step
