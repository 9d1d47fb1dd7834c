"""The batch of one step."""

from dataclasses import dataclass

import torch

from phalanx.errors import ConfigError

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Packed sequences and their targets.

    Attributes:
        input_ids: int64 ``[batch, seq]``.
        labels: int64 ``[batch, seq]``, already shifted: ``labels[b, t]`` is the token after
            ``input_ids[b, t]``, or IGNORE where ``input_ids[b, t]`` ends a document.
        indices: Which sequence of the corpus each row is.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    indices: tuple[int, ...]

    @property
    def num_targets(self) -> int:
        """Labels that count, over the whole batch."""
        return int((self.labels != IGNORE).sum())

    def microbatches(self, num_microbatches: int) -> list["Batch"]:
        """Cut into equal parts, rows in order, without copying.

        Raises:
            ConfigError: The rows cannot be shared out equally.
        """
        rows = len(self.indices)
        if num_microbatches < 1 or rows % num_microbatches:
            raise ConfigError(
                f"a batch of {rows} sequences cannot be cut into {num_microbatches} equal microbatches; "
                "make train.batch_size a multiple of train.microbatches"
            )
        size = rows // num_microbatches
        return [
            Batch(self.input_ids[at : at + size], self.labels[at : at + size], self.indices[at : at + size])
            for at in range(0, rows, size)
        ]
