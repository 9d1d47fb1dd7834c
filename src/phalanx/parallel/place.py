"""Which rank a process is, as its environment says; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.errors import ConfigError

RENDEZVOUS = "PHALANX_RENDEZVOUS"


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and where the others are met.

    Attributes:
        rank: Number among all.
        world: How many there are.
        local_rank: Number among those of this machine.
        local_world: How many those are.
        rendezvous: The file, or None where torchrun's variables say.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    rendezvous: Path | None = None

    @property
    def is_lead(self) -> bool:
        """Whether this is the rank that has the run directory."""
        return self.rank == 0

    def environment(self) -> dict[str, str]:
        """What tells a child process that this place is its own."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            **({} if self.rendezvous is None else {RENDEZVOUS: str(self.rendezvous)}),
        }


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Read this process's place from its environment; None where nobody gave it one.

    Raises:
        ConfigError: It has a rank, and other variables are missing or no numbers.
    """
    if "RANK" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        rank, world, local_rank, local_world = (int(environment[name]) for name in names)
    except (KeyError, ValueError) as exc:
        raise ConfigError(f"environment: expected numbers in {', '.join(names)}, found {exc}; use torchrun") from exc
    path = environment.get(RENDEZVOUS)
    return Place(rank, world, local_rank, local_world, None if path is None else Path(path))
