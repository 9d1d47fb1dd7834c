"""The ``[parallel]`` section: how the ranks of one domain share a step; imports no torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel
from phalanx.planner import Layout

Compression = Literal["none", "fp16", "bf16", "powersgd"]
Recompute = Literal["none", "selective", "full"]


class ParallelConfig(StrictModel):
    """One layout of ranks, and what they do about memory and links.

    Attributes:
        dp: Data parallel: copies that see different sequences.
        tp: Tensor parallel: ranks that share every matrix product.
        pp: Pipeline parallel: ranks that each have some of the layers.
        cp: Context parallel: ranks that share every sequence.
        zero: What the dp * cp copies share instead of each having it: 0 nothing, 1 optimizer state, 2 gradients too,
            3 parameters too.
        schedule: Order of a pipeline's microbatches; "interleaved" gives every rank two stages.
        sequence_parallel: Tensor parallel ranks share the sequence too, where they would do the same work.
        gradient_compression: How gradients travel between copies; with zero below 2.
        offload: Parameters, gradients and optimizer state stay in the host's memory; with zero 2 or 3.
        activation_checkpointing: What the backward pass computes again: nothing, all but matrix products and
            attention ("selective"), or whole blocks ("full").
    """

    dp: int = Field(default=1, ge=1, le=65536)
    tp: int = Field(default=1, ge=1, le=65536)
    pp: int = Field(default=1, ge=1, le=65536)
    cp: int = Field(default=1, ge=1, le=65536)
    zero: int = Field(default=0, ge=0, le=3)
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    sequence_parallel: bool = False
    gradient_compression: Compression = "none"
    offload: bool = False
    activation_checkpointing: Recompute = "none"

    @model_validator(mode="after")
    def _check(self) -> Self:
        copies = self.dp * self.cp
        if self.zero and copies == 1:
            raise ValueError(
                f"zero = {self.zero} shares what dp * cp copies have, and there is one; set dp to 2 or more"
            )
        if self.schedule == "zero-bubble" and self.pp > 1 and copies > 1:
            # measured with torch 2.13; the cause is not known
            raise ValueError(
                f'schedule = "zero-bubble" gives wrong gradients with dp * cp = {copies} copies; take "1f1b" or '
                '"interleaved", or set dp and cp to 1'
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel = true needs tensor parallel ranks; set tp to 2 or more, or cp instead")
        if self.gradient_compression != "none" and (copies == 1 or self.zero >= 2):
            raise ValueError(
                f'gradient_compression = "{self.gradient_compression}" is for gradients that dp * cp = {copies} copies '
                f'all-reduce, with zero = 0 or 1, found {self.zero}; set it to "none"'
            )
        if self.offload and self.zero < 2:
            raise ValueError(f"offload = true needs zero = 2 or 3, found {self.zero}")
        return self

    @property
    def layout(self) -> Layout:
        """The axes alone, as the planner has them."""
        return Layout(self.dp, self.tp, self.pp, self.cp, self.zero, self.schedule)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.layout.world

    @property
    def copies(self) -> int:
        """How many ranks have the same parameters, or share them under ZeRO."""
        return self.dp * self.cp
