"""One stage's part of a checkpoint."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shard:
    """The tensors of one stage.

    Attributes:
        stage: Index of the stage, from 0.
        tensors: By name: ``weight/<parameter>`` and the optimizer's state of the same parameter, such as
            ``exp_avg/<parameter>`` and ``exp_avg_sq/<parameter>``; any shape and dtype.
        num_steps: Optimizer steps that the state has taken.
    """

    stage: int
    tensors: dict[str, Tensor]
    num_steps: int
