"""One optimizer step as every engine sees it: its inputs, its result, and the one call between them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from phalanx.engine.verdict import Verdict
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers


@dataclass(frozen=True)
class StepInputs:
    """The inputs of an engine for one step, one entry per microbatch.

    Attributes:
        ids: Tokens, int64 ``[rows, seq]``.
        labels: Their targets, int64 ``[rows, seq]``.
        num_targets: Labels that count, over all microbatches.
    """

    ids: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    num_targets: int

    def digest(self) -> str:
        """BLAKE3 over tokens and labels, 32 hex characters: the same batch in the same order has the same one."""
        return digest_hex(*(tensor_buffers(tensor.contiguous()) for tensor in (*self.ids, *self.labels)))[:32]


@dataclass(frozen=True)
class GuardReport:
    """The guard's report of one step; the defaults are those of a step in which it found nothing to do.

    Attributes:
        attempts: How often the step was run until it was verified; above 1, it was redone.
        num_audits: Microbatches that were recomputed.
        num_alarms: Disputes that fell in the step.
        verdicts: How they ended.
        restarts: Attempts that the paper's `restart` threw away.
        skipped: Stages that the paper's `skip_layer` left out of this step.
        steps_redone: Earlier steps that were undone and done again before this one.
    """

    attempts: int = 1
    num_audits: int = 0
    num_alarms: int = 0
    verdicts: tuple[Verdict, ...] = ()
    restarts: int = 0
    skipped: tuple[int, ...] = ()
    steps_redone: int = 0


UNGUARDED = GuardReport()
"""What a record says of a step that no guard looked at: it ran once, and nothing was audited."""


@dataclass(frozen=True)
class StepResult:
    """The result of one applied step.

    Attributes:
        step: Its number.
        loss: Mean over the batch's targets, in nats.
        num_targets: How many there are.
        gradient_norm: Of the whole gradient, before it was clipped.
        phases: Seconds by phase, at the process that reports.
        bytes_by_link: What crossed, by ``sender>receiver``; empty where no link is counted.
        batch: Digest of the tokens and labels that the step was applied with.
        guard: What a guard did; None of an engine that has none.
        claimed_links: Of `bytes_by_link`: those between two workers, of which their senders alone have figures.
    """

    step: int
    loss: float
    num_targets: int
    gradient_norm: float
    phases: dict[str, float]
    bytes_by_link: dict[str, int]
    batch: str
    guard: GuardReport | None
    claimed_links: tuple[str, ...] = ()


class Engine(Protocol):
    """The interface between the loop and an engine."""

    def step(self, step: int, inputs: StepInputs) -> StepResult:
        """Run one optimizer step to its end: verified and applied, or an error.

        Raises:
            FailedBatchError: Nothing was applied; the step can be run again with another batch.
        """
        ...
