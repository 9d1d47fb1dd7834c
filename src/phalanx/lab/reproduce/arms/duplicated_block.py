"""The paper's detector: the next stage keeps a copy of the one before it and repeats all its work."""

from collections.abc import Mapping

import torch
from torch import Tensor

from phalanx.pipeline import StageCopy


class DuplicatedBlock:
    """A stage's duplicate on the node of the stage behind it, kept in lock-step by its own optimizer.

    The jumping connection brings the stage's own input; the duplicate does the same work and compares. It needs the
    stage's own work again: forward, backward, optimizer, memory.

    Guarantees:
        Finds every changed bit of a message of the stage, also NaN for NaN and the sign of a zero. Accuses
        no honest stage of the same numeric class; between two kinds of hardware it accuses honest ones,
        for it knows no tolerance. Does not find a lie about the input when the node before is in league,
        and believes the node that holds the duplicate.

    Source: Lu et al. 2023, section 6.2. Their release compares values in the forward direction only; the
    backward comparison follows the text, which says that it mirrors the forward one.
    """

    def __init__(self, copy: StageCopy) -> None:
        self._copy = copy

    @property
    def stage_index(self) -> int:
        """The stage that this is a duplicate of."""
        return self._copy.spec.index

    def repeats_forward(self, step: int, microbatch: int, x: Tensor, claimed: Tensor) -> bool:
        """Whether the duplicate turns `x` ``[batch, seq, dim]`` into exactly the claimed activation."""
        return same_bits(self._copy.runner.forward(step, microbatch, x), claimed)

    def repeats_backward(self, step: int, microbatch: int, gradient: Tensor, claimed: Tensor) -> bool:
        """Whether the duplicate turns a gradient of its output into exactly the claimed one of its input."""
        gradients = self._copy.runner.backward(step, microbatch, gradient)
        return gradients is not None and same_bits(gradients, claimed)

    def take_gradients(self) -> Mapping[str, Tensor]:
        """Weight gradients of the step; afterwards there are none."""
        return self._copy.runner.take_gradients()

    def take_step(self, gradients: Mapping[str, Tensor], lr: float, clip_coefficient: float) -> None:
        """Take the optimizer step that the stage takes.

        Raises:
            TrainingError: A gradient is missing or not of its parameter's shape.
        """
        self._copy.optimizer.step(gradients, lr, clip_coefficient)

    def drop_graphs(self) -> None:
        """Forget graphs and gradients of a step that is not finished."""
        self._copy.runner.abandon_step()

    def has_state_of(self, copy: StageCopy) -> bool:
        """Whether weights and moments equal `copy`'s bit for bit."""
        return self._copy.compute_digest() == copy.compute_digest()


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have one shape, one type and the same bits."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_raw_bytes(left), _raw_bytes(right))


def _raw_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
