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
        min_dp: How few copies the run may go on with where fewer ranks are there; left out, it is `dp`.
        max_dp: How many copies there may be where more ranks are there; left out, it is `dp`.
        restarts: How often the ranks are started again after one of them has died or hung.
        silence_s: Seconds after which a rank that gives no sign of life is taken for hung.
        unsafe_public_network: Let ranks talk over an address that is not private: whoever reaches it can run code in
            every one of them.
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
    min_dp: int | None = Field(default=None, ge=1, le=65536)
    max_dp: int | None = Field(default=None, ge=1, le=65536)
    restarts: int = Field(default=3, ge=0)
    silence_s: float = Field(default=30.0, ge=2.0)
    unsafe_public_network: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        copies = self.dp * self.cp
        if not self.fewest_dp <= self.dp <= self.most_dp:
            raise ValueError(
                f"dp = {self.dp} is not between min_dp = {self.fewest_dp} and max_dp = {self.most_dp}; change one of "
                "the three"
            )
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
    def figures(self) -> dict[str, int]:
        """Ranks, stages and axes, for a run's summary."""
        layout = self.layout
        axes = {axis: getattr(self, axis) for axis in ("dp", "tp", "pp", "cp")}
        return {"processes": self.world, "stages": layout.pp * layout.stages_per_rank, **axes}

    @property
    def fewest_dp(self) -> int:
        """How few data parallel copies there may be."""
        return self.dp if self.min_dp is None else self.min_dp

    @property
    def most_dp(self) -> int:
        """How many data parallel copies there may be."""
        return self.dp if self.max_dp is None else self.max_dp

    @property
    def ranks_per_copy(self) -> int:
        """How many ranks one data parallel copy has."""
        return self.tp * self.pp * self.cp

    @property
    def copies(self) -> int:
        """How many ranks have the same parameters, or share them under ZeRO."""
        return self.dp * self.cp
