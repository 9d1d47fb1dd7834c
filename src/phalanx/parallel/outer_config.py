"""The ``[parallel.outer]`` section: how islands of ranks train apart and are joined; imports no torch."""

from typing import Literal

from pydantic import Field

from phalanx.config import StrictModel
from phalanx.planner import Outer


class OuterConfig(StrictModel):
    """Islands of data parallel copies step by themselves, and are joined every so many steps (DiLoCo).

    Attributes:
        every: Steps that each island makes by itself.
        islands: How many there are, each of ``dp / islands`` copies; left out, every copy is one.
        lr: Of the outer step, which takes the mean of what the islands have moved as its gradient. 1 without momentum
            is local SGD: the islands' parameters are averaged.
        momentum: Nesterov's, of the outer step.
        compression: "int8" sends a byte for each number instead of four; what that loses is added the next time.
    """

    every: int = Field(ge=1)
    islands: int | None = Field(default=None, ge=2, le=65536)
    lr: float = Field(default=0.7, gt=0.0, allow_inf_nan=False)
    momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    compression: Literal["none", "int8"] = "none"

    @property
    def planned(self) -> Outer:
        """As the planner has it."""
        return Outer(self.every, self.islands, rounds=self.compression == "int8")
