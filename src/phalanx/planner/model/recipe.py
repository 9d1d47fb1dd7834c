"""The recipe of a training, whatever the layout: batch, precision, checkpointing and offloading."""

from dataclasses import dataclass
from typing import Literal

from phalanx.planner.model.adapter import Adapter
from phalanx.planner.model.optimizers import OPTIMIZERS

Precision = Literal["fp32", "bf16", "fp16", "autocast"]
Checkpointing = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "all"]

EXACT_BYTES = 4
"""Of a number to which several ranks add, whatever the precision."""

_WEIGHT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "autocast": 4}
_MASTER_BYTES = {"fp32": 0, "bf16": 4, "fp16": 4, "autocast": 0}


@dataclass(frozen=True)
class OuterLoop:
    """Islands of copies step by themselves, and are joined every so many steps.

    Attributes:
        every: Number of steps between two joins.
        islands: Number of islands; None makes every data parallel copy one.
        rounds: Numbers are sent between islands as bytes.
    """

    every: int
    islands: int | None = None
    rounds: bool = False


@dataclass(frozen=True)
class Recipe:
    """One way to train.

    Attributes:
        sequences: Sequences of one optimizer step, all ranks together.
        microbatches: Equal parts into which each data parallel rank cuts its sequences.
        precision: ``bf16`` and ``fp16`` keep 16-bit weights and gradients beside an fp32 master copy; ``autocast``
            keeps fp32 weights and computes in bf16.
        optimizer: A key of `OPTIMIZERS`; its state is in fp32.
        checkpointing: Recomputation in the backward pass: ``selective`` all but the products of matrices and attention,
            ``full`` every block.
        offload: State in the host's memory: the optimizer's state, or parameters and gradients too.
        sequence_parallel: Tensor parallel ranks share what lies between the matrix products as well.
        fused_attention: A kernel that keeps no scores, where the family has one.
        fused_activation: GPT-2's activation by one kernel, as in engine `parallel`; else as transformers composes it.
        adapter: Adapter beside frozen weights; None trains all weights.
        outer: Joins of islands; None joins gradients in every step.
    """

    sequences: int
    sequence_length: int
    microbatches: int = 1
    precision: Precision = "fp32"
    optimizer: str = "adamw"
    checkpointing: Checkpointing = "none"
    offload: Offload = "none"
    sequence_parallel: bool = False
    fused_attention: bool = True
    fused_activation: bool = True
    adapter: Adapter | None = None
    outer: OuterLoop | None = None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequences * self.sequence_length

    @property
    def weight_bytes(self) -> int:
        """Bytes of a stored parameter, and of its gradient."""
        return _WEIGHT_BYTES[self.precision]

    @property
    def state_bytes(self) -> int:
        """Bytes of a parameter's optimizer state and master copy."""
        return OPTIMIZERS[self.optimizer].bytes_per_parameter + _MASTER_BYTES[self.precision]

    @property
    def inner_bytes(self) -> int:
        """Bytes of a number that matrix products read and write."""
        return 4 if self.precision == "fp32" else 2

    @property
    def stream_bytes(self) -> int:
        """Bytes of a number of the residual stream and of what norms read; autocast keeps both in fp32."""
        return 4 if self.precision in ("fp32", "autocast") else 2
