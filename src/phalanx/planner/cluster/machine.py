"""The machine under a step, in the planner's words."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.planner.cluster.links import Link

Exchange = Literal["sum", "slices", "swap", "gradients", "parameters", "send"]
"""What stops the computation of a block: its tensor parallel sums, slices of the sequence that are joined or summed,
context parallel all-to-alls, and the gradients and parameters of a block that ZeRO shares; and what a pipeline's stage
waits for."""

Shares = tuple[float, float, float]
"""Of a block's seconds: its forward pass, the way back to its inputs, and the gradients of its weights."""

THIRDS: Shares = (1 / 3, 1 / 3, 1 / 3)
"""Shares where all work is products of matrices."""


@dataclass(frozen=True)
class Machine:
    """The machine that a step runs on.

    Attributes:
        flops_per_s: Operations that one rank really does in a second: its peak times what products reach of it.
        memory_bytes_per_s: Memory bandwidth of a rank; None where it is not known: the optimizer then takes no time.
        per_node: Ranks that the inner link joins.
        host_bytes_per_s: Between a rank and its host's memory; None where it is not known.
        microbatch_s: Seconds that a microbatch costs in each stage of a pipeline beside its computation.
        head_flops_per_s: The same as `flops_per_s` for the head and the loss; None where they are alike.
        first_s: Seconds that a microbatch costs in the first stage beside its blocks, whatever its size.
        last_s: The same in the last stage; both for the tables of a vocabulary, which tensor parallel ranks share.
        block_s: Seconds that a microbatch costs in each block, forward and backward, whatever its size.
        shares: Shares of the passes in a block's seconds.
        number_s: Seconds that one number of the residual stream costs in a block beside the products, forward and
            backward: norms and sums, which tensor parallel ranks share with the sequence alone.
        shared_block_s: Seconds that sharing a block costs each microbatch with ZeRO 2 and 3, whatever its size.
        overlap: Exchanges go on beside computation.
        cores: That the ranks of a node share; None where each has a device of its own.
        exchanges: Links of exchanges that were measured in the midst of computation, on ranks of one node; for others
            `inside` is taken.
        apart: Link between islands; None where it is that which their ranks have anyway.
    """

    flops_per_s: float
    memory_bytes_per_s: float | None
    per_node: int
    inside: Link
    between: Link
    host_bytes_per_s: float | None = None
    microbatch_s: float = 0.0
    head_flops_per_s: float | None = None
    first_s: float = 0.0
    last_s: float = 0.0
    block_s: float = 0.0
    shares: Shares = THIRDS
    number_s: float = 0.0
    shared_block_s: float = 0.0
    overlap: bool = True
    cores: int | None = None
    exchanges: Mapping[Exchange, Link] = field(default_factory=dict)
    island_link: Link | None = None

    def crowding_factor(self, ranks: int) -> float:
        """Return the factor by which work takes longer while so many ranks of all nodes do it at once."""
        if self.cores is None:
            return 1.0
        return max(1.0, min(ranks, self.per_node) / self.cores)

    def without_waiting(self) -> "Machine":
        """The same machine without any waiting: exchanges take only as long as they keep a core busy."""
        return replace(
            self,
            inside=self.inside.without_waiting(),
            between=self.between.without_waiting(),
            exchanges={name: link.without_waiting() for name, link in self.exchanges.items()},
            island_link=None if self.island_link is None else self.island_link.without_waiting(),
        )
