"""One unit of work of a stage."""

from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]


class Action(NamedTuple):
    """Run one microbatch through a stage in one direction."""

    direction: Direction
    microbatch: int
