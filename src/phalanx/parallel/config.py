"""The ``[parallel]`` section: how the ranks of one domain share a step; imports no torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from phalanx.config import StrictModel, one_of
from phalanx.planner import SCHEDULES, Layout, OuterLoop


class OuterConfig(StrictModel):
    """Islands of data parallel copies step by themselves, and are joined every so many steps (DiLoCo).

    Attributes:
        every: Steps that each island makes by itself.
        islands: Number of islands, each of ``dp / islands`` copies; None makes every copy one.
        lr: Learning rate of the outer step, whose gradient is the mean movement of the islands. 1 without momentum is
            local SGD: the islands' parameters are averaged.
        momentum: Nesterov's, of the outer step.
        compression: "int8" sends a byte for each number instead of four; the rounding error is added the next time.
    """

    every: int = Field(ge=1)
    islands: int | None = Field(default=None, ge=2, le=65536)
    lr: float = Field(default=0.7, gt=0.0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    compression: Literal["none", "int8"] = "none"

    @property
    def planned_outer(self) -> OuterLoop:
        """As the planner has it."""
        return OuterLoop(self.every, self.islands, rounds=self.compression == "int8")


Compression = Literal["none", "fp16", "bf16", "powersgd", "int8_gathers", "int8"]
Recompute = Literal["none", "selective", "full"]
ContextBy = Literal["ulysses", "ring"]

SHARED_GRADIENTS = 2
"""Lowest ZeRO level at which gradients are shared."""

OF_SHARED_GRADIENTS: tuple[Compression, ...] = ("int8_gathers", "int8")
"""Compressions of what ZeRO 2 and 3 exchange; the others are of gradients that copies all-reduce."""


class ParallelConfig(StrictModel):
    """One layout of ranks, and their settings for memory and links.

    Attributes:
        dp: Data parallel: copies that see different sequences.
        tp: Tensor parallel: ranks that share every matrix product.
        pp: Pipeline parallel: ranks that each have some of the layers.
        cp: Context parallel: ranks that share every sequence.
        context: Method by which they see the whole sequence: "ulysses" trades slices of the sequence for heads and
            back, in a "ring" keys and values go from rank to rank.
        zero: State that the dp * cp copies share instead of each having it: 0 nothing, 1 optimizer state, 2 gradients
            too, 3 parameters too.
        replicas: Number of groups of copies that each share among themselves, with zero 2 or 3 (hybrid sharding):
            parameters travel inside a group, gradients between groups once a step.
        schedule: Order of a pipeline's microbatches; the interleaved ones give every rank two stages.
        sequence_parallel: Tensor parallel ranks share the sequence too, where they would do the same work.
        gradient_compression: Compression of what copies send each other: "fp16", "bf16" and "powersgd" of gradients
            with zero below 2; with zero 2 or 3 "int8_gathers" of gathered weights, "int8" of weights and gradients.
        offload: Parameters, gradients and optimizer state stay in the host's memory; with zero 2 or 3.
        activation_checkpointing: Recomputation in the backward pass: nothing, all but matrix products and attention
            ("selective"), or whole blocks ("full").
        compile: Blocks are compiled by torch's inductor.
        outer: Copies train apart for some steps; None joins their gradients in every step.
        min_dp: Minimum number of copies to go on with where fewer ranks are there; None for `dp`.
        max_dp: Maximum number of copies where more ranks are there; None for `dp`.
        restarts: Number of restarts of the ranks after one of them has died or hung.
        silence_s: Seconds after which a rank without a heartbeat is taken for hung.
        unsafe_public_network: Let ranks talk over an address that is not private: a machine that reaches it can run
            code in every one of them.
    """

    dp: int = Field(default=1, ge=1, le=65536)
    tp: int = Field(default=1, ge=1, le=65536)
    pp: int = Field(default=1, ge=1, le=65536)
    cp: int = Field(default=1, ge=1, le=65536)
    context: ContextBy = "ulysses"
    zero: int = Field(default=0, ge=0, le=3)
    replicas: int = Field(default=1, ge=1, le=65536)
    schedule: Annotated[str, one_of(SCHEDULES)] = "1f1b"
    sequence_parallel: bool = False
    gradient_compression: Compression = "none"
    offload: bool = False
    activation_checkpointing: Recompute = "none"
    compile: bool = False
    outer: OuterConfig | None = None
    min_dp: int | None = Field(default=None, ge=1, le=65536)
    max_dp: int | None = Field(default=None, ge=1, le=65536)
    restarts: int = Field(default=3, ge=0)
    silence_s: float = Field(default=30.0, ge=2.0)
    unsafe_public_network: bool = False

    @model_validator(mode="after")
    def _check_copies(self) -> Self:
        if not self.min_dp_copies <= self.dp <= self.max_dp_copies:
            raise ValueError(
                f"dp = {self.dp} is not between min_dp = {self.min_dp_copies} and max_dp = {self.max_dp_copies}; "
                "change one of the three"
            )
        if self.dp % self.num_islands:
            raise ValueError(f"outer.islands = {self.num_islands} does not divide dp = {self.dp}; change one of them")
        if self.outer is not None and self.num_islands == 1:
            raise ValueError(f"outer joins islands of data parallel copies, and dp = {self.dp}; set dp to 2 or more")
        copies = f"dp * cp = {self.num_copies} copies" + (
            f" on {self.num_islands} islands" if self.num_islands > 1 else ""
        )
        if self.zero and self.copies_per_island == 1:
            raise ValueError(
                f"zero = {self.zero} shares what dp * cp copies of an island have, and there is one: {copies}; "
                "raise dp, or set zero to 0"
            )
        self._check_compression(copies)
        if self.offload and self.zero < SHARED_GRADIENTS:
            raise ValueError(f"offload = true needs zero = 2 or 3, found {self.zero}")
        self._check_replicas()
        return self

    @model_validator(mode="after")
    def _check_rest(self) -> Self:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel = true needs tensor parallel ranks; set tp to 2 or more, or cp instead")
        if SCHEDULES[self.schedule].splits_backward and self.pp > 1:
            self._check_zero_bubble()
        if self.compile:
            self._check_compile()
        return self

    def _check_compression(self, copies: str) -> None:
        name = self.gradient_compression
        if name in OF_SHARED_GRADIENTS and self.zero < SHARED_GRADIENTS:
            raise ValueError(
                f'gradient_compression = "{name}" is for parameters and gradients that {copies} share, with zero = 2 '
                f'or 3, found {self.zero}; set it to "none", or zero to 2 or 3'
            )
        if name in ("none", *OF_SHARED_GRADIENTS):
            return
        if self.copies_per_island == 1 or self.zero >= SHARED_GRADIENTS:
            raise ValueError(
                f'gradient_compression = "{name}" is for gradients that {copies} all-reduce, with zero = 0 or 1, found '
                f'{self.zero}; set it to "none"'
            )

    def _check_replicas(self) -> None:
        if self.replicas == 1:
            return
        if self.zero < SHARED_GRADIENTS:
            raise ValueError(f"replicas = {self.replicas} needs zero = 2 or 3, found {self.zero}; remove it")
        if (self.dp // self.num_islands) % self.replicas:
            raise ValueError(
                f"replicas = {self.replicas} does not divide dp = {self.dp}"
                + (f" on {self.num_islands} islands" if self.num_islands > 1 else "")
                + "; change one of them"
            )
        if self.copies_per_island == self.replicas:
            raise ValueError(
                f"replicas = {self.replicas} leaves each group one copy, which shares nothing; set zero to 0 or 1"
            )

    def _check_zero_bubble(self) -> None:
        if self.activation_checkpointing == "selective":
            raise ValueError(
                f'schedule = "{self.schedule}" goes back through a block twice, and torch lets nobody go twice through '
                'one of which some results were kept; set activation_checkpointing to "full" or "none", or take "1f1b"'
            )
        if self.gradient_compression != "none":
            raise ValueError(
                f'schedule = "{self.schedule}" computes weight gradients apart from the backward pass, where hooks '
                'that compress them do not see them; set gradient_compression to "none", or take "1f1b"'
            )
        if self.zero > SHARED_GRADIENTS:
            raise ValueError(
                f'schedule = "{self.schedule}" with zero = 3 would lose gradients: a block\'s parameters are shared '
                'out again before their gradients are computed; take zero = 2, or "1f1b" or "interleaved"'
            )

    def _check_compile(self) -> None:
        if self.tp > 1 or self.cp > 1:
            raise ValueError(
                f"compile = true: tp = {self.tp} and cp = {self.cp} exchange inside a block, which the compiler would "
                "cut into pieces; set both to 1, or compile to false"
            )
        if self.activation_checkpointing == "selective":
            raise ValueError(
                'compile = true: activation_checkpointing = "selective" goes by single operations, which a compiled '
                'block has no more; take "full" or "none"'
            )
        if SCHEDULES[self.schedule].splits_backward and self.pp > 1:
            raise ValueError(
                f'compile = true: schedule = "{self.schedule}" splits the backward pass, a compiled one is in one '
                'piece; take "1f1b" or "interleaved"'
            )

    @property
    def planned_layout(self) -> Layout:
        """The axes alone, as the planner has them."""
        groups = {"replicas": self.replicas, "islands": self.num_islands}
        return Layout(self.dp, self.tp, self.pp, self.cp, self.zero, self.schedule, context=self.context, **groups)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.planned_layout.num_ranks

    @property
    def layout_figures(self) -> dict[str, int]:
        """Ranks, stages and axes, for a run's summary."""
        layout = self.planned_layout
        axes = {axis: getattr(self, axis) for axis in ("dp", "tp", "pp", "cp")}
        return {"processes": self.num_ranks, "stages": layout.pp * layout.stages_per_rank, **axes}

    @property
    def min_dp_copies(self) -> int:
        """Minimum number of data parallel copies."""
        return self.dp if self.min_dp is None else self.min_dp

    @property
    def max_dp_copies(self) -> int:
        """Maximum number of data parallel copies."""
        return self.dp if self.max_dp is None else self.max_dp

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks of one data parallel copy."""
        return self.tp * self.pp * self.cp

    @property
    def num_copies(self) -> int:
        """Number of ranks that have the same part of the model."""
        return self.dp * self.cp

    @property
    def num_islands(self) -> int:
        """Into how many islands the copies are cut; one where gradients are joined in every step."""
        if self.outer is None:
            return 1
        return self.dp if self.outer.islands is None else self.outer.islands

    @property
    def copies_per_island(self) -> int:
        """Return the number of copies that join their gradients in every step: the copies of an island."""
        return self.num_copies // self.num_islands
