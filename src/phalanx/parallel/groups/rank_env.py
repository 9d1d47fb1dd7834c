"""The rank of a process, as its environment says; imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from phalanx.errors import ConfigError

RENDEZVOUS = "PHALANX_RENDEZVOUS"
MEETINGS = "PHALANX_MEETINGS"
"""Names a private directory, in which each start of the ranks meets by a file of its own."""
KEPT = "PHALANX_KEPT"
"""Set where the process that started this rank looks for its heartbeats."""
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class RankEnv:
    """The rank that this process is, and where the others are met.

    Attributes:
        local_rank: Number among the ranks of this machine.
        local_world: Number of ranks on this machine.
        rendezvous: The file, or None where torchrun's variables say.
        is_kept: The process that started this one looks for its heartbeats, and it need not look for others'.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    rendezvous: Path | None = None
    is_kept: bool = False

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.local_world == self.world

    def with_world(self, world: int) -> "RankEnv":
        """The same place where only the first ranks train; those on this machine are counted anew."""
        if world == self.world:
            return self
        return replace(self, world=world, local_world=world if self.is_on_one_machine else self.local_world)

    @property
    def is_lead(self) -> bool:
        """Whether this is the rank that has the run directory."""
        return self.rank == 0

    def to_environment(self) -> dict[str, str]:
        """Environment variables by which a child process knows this place as its own."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            **({} if self.rendezvous is None else {RENDEZVOUS: str(self.rendezvous)}),
            **({KEPT: "1"} if self.is_kept else {}),
        }


def find_place(environment: Mapping[str, str]) -> RankEnv | None:
    """Read this process's place from its environment; None where it was given none."""
    if "RANK" not in environment:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        rank, world, local_rank, local_world = (int(environment[name]) for name in names)
    except (KeyError, ValueError) as exc:
        raise ConfigError(f"environment: expected numbers in {', '.join(names)}, found {exc}; use torchrun") from exc
    return RankEnv(rank, world, local_rank, local_world, _rendezvous_file(environment), KEPT in environment)


def _rendezvous_file(environment: Mapping[str, str]) -> Path | None:
    if MEETINGS in environment:
        # one that an earlier start left would send ranks to addresses where none listens
        return Path(environment[MEETINGS]) / f"meeting-{environment.get(_ATTEMPT, '0')}"
    path = environment.get(RENDEZVOUS)
    return None if path is None else Path(path)
