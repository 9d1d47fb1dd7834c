"""One optimizer step as every engine sees it: its inputs, its result, and the one call between them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from phalanx.config import canonical_json
from phalanx.engine.verdict import Verdict
from phalanx.errors import DataError, FailedBatchError, SpikeError
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers

NO_EXTRAS: Mapping[str, Tensor] = MappingProxyType({})
"""The named rows of a microbatch that has none."""


@dataclass(frozen=True)
class StepLimits:
    """The limits under which a step may be applied; every engine looks before its update.

    Attributes:
        max_loss: A higher mean loss, in nats, is a spike.
        max_norm: A higher norm of the whole gradient before clipping is a spike.
        rate_factor: Multiplies the learning rate of this step.
    """

    max_loss: float = math.inf
    max_norm: float = math.inf
    rate_factor: float = 1.0

    def find_fault(self, step: int, loss: float, norm: float) -> FailedBatchError | None:
        """Return why a batch is not applied: a number that is none, or a spike; None where it may be."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return FailedBatchError(
                f"step {step}: loss {loss}, gradient norm {norm}; lower optimizer.lr or set optimizer.clip_norm"
            )
        if loss <= self.max_loss and norm <= self.max_norm:
            return None
        return SpikeError(
            f"step {step}: loss {loss:.4g} (allowed {self.max_loss:.4g}), gradient norm {norm:.4g} (allowed "
            f"{self.max_norm:.4g}), far above the steps before; look at the batch, lower optimizer.lr, or raise "
            "train.stability.threshold",
            loss,
            norm,
        )


NO_LIMITS = StepLimits()
"""A step is applied whenever loss and gradient are numbers."""


@dataclass(frozen=True)
class StepInputs:
    """The inputs of an engine for one step, one entry per microbatch.

    Attributes:
        ids: Tokens, int64 ``[rows, seq]``; hidden states, float32 ``[rows, seq, hidden]``, where other parties have the
            front of the model.
        labels: Their targets, int64 ``[rows, seq]``.
        num_targets: Labels that count, over all microbatches.
        extras: Named rows beside them, ``[rows, ...]``, for an objective that reads them; empty where there are none.
        limits: Bounds of loss and norm, and the factor of the rate.
    """

    ids: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    num_targets: int
    extras: tuple[Mapping[str, Tensor], ...] = ()
    limits: StepLimits = NO_LIMITS

    def __post_init__(self) -> None:
        if not self.extras:
            return
        if len(self.extras) != len(self.ids):
            raise DataError(f"extras: are of {len(self.extras)} microbatches, the step has {len(self.ids)}")
        names = sorted(self.extras[0])
        for number, (ids, named) in enumerate(zip(self.ids, self.extras, strict=True)):
            if sorted(named) != names:
                raise DataError(f"extras: microbatch {number} has {sorted(named)}, the first one {names}")
            for name, rows in named.items():
                if rows.ndim < 1 or rows.shape[0] != ids.shape[0]:
                    raise DataError(
                        f"extras.{name}: microbatch {number} has shape {list(rows.shape)} and {ids.shape[0]} rows of "
                        "tokens; give one row for each"
                    )

    def extras_of(self, microbatch: int) -> Mapping[str, Tensor]:
        """The named rows of a microbatch."""
        return self.extras[microbatch] if self.extras else NO_EXTRAS

    def batch_digest(self) -> str:
        """Digest of tokens, labels and extra rows: the same batch in the same order has the same one.

        Returns:
            The first 32 hex characters of BLAKE3 over tokens and labels. Where there are extra rows: of BLAKE3 over
            those 32 characters, then canonical JSON of name, type and shapes of each extra in the order of the names,
            then their bytes in that order.
        """
        plain = digest_hex(*(tensor_buffers(tensor.contiguous()) for tensor in (*self.ids, *self.labels)))[:32]
        if not (self.extras and self.extras[0]):
            return plain
        columns = [(name, [named[name] for named in self.extras]) for name in sorted(self.extras[0])]
        shapes = [
            [name, str(rows[0].dtype).removeprefix("torch."), [list(row.shape) for row in rows]]
            for name, rows in columns
        ]
        buffers = [tensor_buffers(row.contiguous()) for _, rows in columns for row in rows]
        return digest_hex(plain.encode("ascii"), canonical_json(shapes), *buffers)[:32]


@dataclass(frozen=True)
class GuardReport:
    """The guard's report of one step; the defaults describe a step without findings.

    Attributes:
        attempts: Number of runs until the step was verified; above 1, it was redone.
        num_alarms: Disputes that fell in the step.
        steps_redone: Earlier steps that were undone and done again before this one.
    """

    attempts: int = 1
    num_audits: int = 0
    num_alarms: int = 0
    verdicts: tuple[Verdict, ...] = ()
    steps_redone: int = 0


UNGUARDED = GuardReport()
"""What a record says of a step that no guard looked at: it ran once, and nothing was audited."""


@dataclass(frozen=True)
class StepResult:
    """The result of one applied step.

    Attributes:
        loss: Mean over the batch's targets, in nats.
        gradient_norm: Norm of the whole gradient before clipping.
        phases: Seconds by phase, at the process that reports.
        bytes_by_link: Bytes by ``sender>receiver``; empty where no link is counted.
        batch: Digest of the batch that the step was applied with.
        guard: Report of the guard; None where the engine has none.
        claimed_links: Links of `bytes_by_link` between two workers: claims of their senders.
        party_phases: Seconds by phase of other parties: each worker's last report, usually of the step before;
            a site's or client's in this step, `measured` where this process has measured all of them.
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
    party_phases: dict[str, dict[str, Any]] = field(default_factory=dict)


class Engine(Protocol):
    """The interface between the loop and an engine."""

    def train_turn(self, step: int, inputs: StepInputs) -> StepResult:
        """Run one optimizer step to its end: verified and applied, or an error.

        Raises:
            FailedBatchError: Nothing was applied; the step can be run again with another batch.
        """
