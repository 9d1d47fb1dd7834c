"""The upkeeps of a shadow, a line each: all that the guard asks of a value of ``guard.shadow``."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Shadow = Literal["gradient", "lockstep", "adapters", "update", "snapshot"]


@dataclass(frozen=True)
class Upkeep:
    """One way to keep a shadow like its stage.

    Attributes:
        sends: What a stage sends its shadow: the weight gradient of a step before it commits, new weights after an
            update, its whole state (weights and moments) every so many steps, or nothing.
        bytes_sent: Bytes a trained parameter of one transfer in fp32.
        in_lockstep: Whether the shadow recomputes every microbatch of every step, the weight gradient included.
        adapters_only: Whether it promises that nothing but adapters is trained.
    """

    sends: Literal["gradient", "weights", "state", "nothing"]
    bytes_sent: int
    in_lockstep: bool = False
    adapters_only: bool = False

    @property
    def makes_updates(self) -> bool:
        """Whether a shadow has an optimizer of its own, so that it can serve the stage as it is."""
        return self.in_lockstep or self.sends == "gradient"


UPKEEPS: Mapping[str, Upkeep] = {
    "gradient": Upkeep("gradient", 4),
    "lockstep": Upkeep("nothing", 0, in_lockstep=True),
    "adapters": Upkeep("gradient", 4, adapters_only=True),
    "update": Upkeep("weights", 4),
    "snapshot": Upkeep("state", 12),
}
"""By the value of ``guard.shadow``; a further one is a line here, and a word of `Shadow`."""

REMOVED_SHADOWS = {"replica": "it sent the most and was the slowest upkeep on a slow line (ADR 70)"}
"""Upkeeps that older versions had and this one neither runs nor verifies, with the reason."""
