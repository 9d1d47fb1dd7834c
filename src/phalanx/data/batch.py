"""The batch of one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from phalanx.errors import ConfigError, DataError

IGNORE = -100

DOCUMENTS = "documents"
"""The name of the extra rows that say which document a token is of, int64 ``[batch, seq]``: attention stays inside."""
PREFIX = "prefix"
"""The name of the extra rows that say how many tokens of each row are its prefix, which all tokens see, int64
``[batch]``."""
OF_ATTENTION = (DOCUMENTS, PREFIX)
"""The names of the extra rows that stages read, and no objective."""


def without_attention(extras: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the extra rows that an objective reads."""
    return {name: rows for name, rows in extras.items() if name not in OF_ATTENTION}


@dataclass(frozen=True)
class BatchPart:
    """The rows of a batch that one of several objectives learns.

    Attributes:
        weight: Factor of the objective's mean loss in the loss of the step.
        tokens: Number of tokens in its rows, padding included.
        labels: Number of tokens in its rows that are learned.
    """

    name: str
    weight: float
    rows: int
    tokens: int
    labels: int


@dataclass(frozen=True)
class Batch:
    """Packed sequences and their targets.

    Attributes:
        input_ids: int64 ``[batch, seq]``.
        labels: int64 ``[batch, seq]``, already shifted: ``labels[b, t]`` is the token after
            ``input_ids[b, t]``, or IGNORE where ``input_ids[b, t]`` ends a document.
        extras: More rows beside tokens and labels, by name: masks, weights, advantages; ``[batch, ...]`` each.
        parts: Objective of the rows, in their order, if several objectives learn at once; extra rows then have the
            divisor of each loss.

    Raises:
        DataError: An extra tensor has not a row for each sequence.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    indices: tuple[int, ...]
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[BatchPart, ...] = ()

    def __post_init__(self) -> None:
        for name, rows in self.extras.items():
            if rows.ndim < 1 or rows.shape[0] != len(self.indices):
                raise DataError(
                    f"extras.{name}: has shape {list(rows.shape)}, the batch {len(self.indices)} sequences; "
                    "give one row for each"
                )

    def split_microbatches(self, num_microbatches: int) -> list["Batch"]:
        """Cut into equal parts, rows in order, without copying."""
        rows = len(self.indices)
        if num_microbatches < 1 or rows % num_microbatches:
            raise ConfigError(
                f"a batch of {rows} sequences cannot be divided into {num_microbatches} equal microbatches; make "
                "train.batch_size a multiple of train.microbatches"
            )
        size = rows // num_microbatches
        return [
            Batch(
                self.input_ids[start : start + size],
                self.labels[start : start + size],
                self.indices[start : start + size],
                {name: column[start : start + size] for name, column in self.extras.items()},
            )
            for start in range(0, rows, size)
        ]


def ignore_repeats(batch: Batch) -> Batch:
    """Return a batch in which a sequence that is there twice, at the edge of two epochs, has targets once."""
    repeats = [row for row, index in enumerate(batch.indices) if index in batch.indices[:row]]
    if not repeats:
        return batch
    labels = batch.labels.clone()
    labels[repeats] = IGNORE
    return replace(batch, labels=labels)
