"""One optimizer step as every engine sees it: its inputs, its result, and the one call between them."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from phalanx.config import canonical_json
from phalanx.engine.verdict import Verdict
from phalanx.errors import ConfigError, DataError
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers


def check_build(device: str, where: str) -> None:
    """Refuse a GPU where the installed torch was built without any; imports no torch.

    Args:
        device: "cpu" or "cuda", with or without a number.
        where: The key or option that names it.

    Raises:
        ConfigError: The build is for CPUs alone.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if device.startswith("cuda") and version.endswith("+cpu"):
        raise _device_error(
            device, where, f"torch {version} is built for CPUs alone", "install a build of torch with CUDA"
        )


def check_device(device: str, where: str) -> None:
    """Refuse a device that torch does not find on this machine.

    Args:
        device: "cpu" or "cuda", with or without a number.
        where: The key or option that names it.

    Raises:
        ConfigError: It is not there.
    """
    check_build(device, where)
    if not device.startswith("cuda"):
        return
    import torch  # noqa: PLC0415 - a run on CPUs is checked without it

    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(device.partition(":")[2] or 0)
    if not device_count:
        raise _device_error(
            device, where, f"torch {torch.__version__} finds no CUDA device here", "run where there is one"
        )
    if number >= device_count:
        last = f"cuda:0 to cuda:{device_count - 1}" if device_count > 1 else "cuda:0"
        raise _device_error(device, where, f"torch finds {device_count} here, {last}", "take one of these")


def _device_error(device: str, where: str, found: str, instead: str) -> ConfigError:
    return ConfigError(f'{where} = "{device}": {found}; set {where} = "cpu", or {instead}').with_facts(
        code="PHX-C009", key=where, found=device, expected="cpu", do=instead
    )


NO_EXTRAS: Mapping[str, Tensor] = MappingProxyType({})
"""The named rows of a microbatch that has none."""


@dataclass(frozen=True)
class StepInputs:
    """The inputs of an engine for one step, one entry per microbatch.

    Attributes:
        ids: Tokens, int64 ``[rows, seq]``; hidden states, float32 ``[rows, seq, hidden]``, where other parties have the
            front of the model.
        labels: Their targets, int64 ``[rows, seq]``.
        num_targets: Labels that count, over all microbatches.
        extras: Named rows beside them, ``[rows, ...]``, for an objective that reads them; empty where there are none.

    Raises:
        DataError: The extra rows are not those of the microbatches.
    """

    ids: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]
    num_targets: int
    extras: tuple[Mapping[str, Tensor], ...] = ()

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
        guard: None of an engine without a guard.
        claimed_links: Links of `bytes_by_link` between two workers: claims of their senders.
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

    def train_turn(self, step: int, inputs: StepInputs) -> StepResult:
        """Run one optimizer step to its end: verified and applied, or an error.

        Raises:
            FailedBatchError: Nothing was applied; the step can be run again with another batch.
        """
        ...
