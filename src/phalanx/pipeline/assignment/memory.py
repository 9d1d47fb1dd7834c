"""The memory that stages need and parties say they have: does an assignment fit?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from phalanx.errors import ConfigError
from phalanx.pipeline.processes.own_memory import ALONE

Rooms = Mapping[str, int]
"""Bytes that a party may use, by the name of what it shares them with; see `measure_own_memory`."""

_ADVICE = (
    "add workers, give them more memory (memory_mib in a worker file says how much one may use), raise pipeline.stages "
    "so that each stage is smaller, or train.microbatches so that each microbatch is"
)


@dataclass(frozen=True)
class Footprint:
    """Bytes that one stage takes.

    Attributes:
        held: At the party that serves it.
        shadowed: At the party that shadows it.
    """

    held: int
    shadowed: int


class Memory:
    """The memory that stages need and that parties have, at one moment.

    Parties of one name share that memory. Each party's claim limits itself, and itself together with all parties of
    smaller claims: beside a liar of the same name, an honest party is given neither less than without the liar, nor
    more than it has.

    Args:
        footprints: One per stage; everything fits where it is empty.
        rooms: Limits by party; a party without an entry has none.
    """

    def __init__(
        self,
        footprints: Sequence[Footprint] = (),
        rooms: Mapping[str, Rooms] = MappingProxyType({}),
    ) -> None:
        self._footprints = footprints
        ladders: dict[tuple[str, str], list[tuple[int, str]]] = {}
        limited = rooms if footprints else {}
        for party, limits in limited.items():
            for name, size in limits.items():
                ladders.setdefault((name, party if name == ALONE else ""), []).append((size, party))
        self._ladders = [sorted(ladder) for ladder in ladders.values()]

    def footprint_of(self, stage: int) -> Footprint:
        """Return the bytes that a stage needs."""
        return self._footprints[stage] if self._footprints else Footprint(0, 0)

    def bytes_by_party(self, holders: Mapping[int, str], *shadows: Mapping[int, str]) -> dict[str, int]:
        """Bytes that each party would use."""
        total: dict[str, int] = {}
        for stage, party in holders.items():
            total[party] = total.get(party, 0) + self.footprint_of(stage).held
        for stage, party in ((stage, party) for roles in shadows for stage, party in roles.items()):
            total[party] = total.get(party, 0) + self.footprint_of(stage).shadowed
        return total

    def excess_bytes(self, holders: Mapping[int, str], *shadows: Mapping[int, str]) -> int:
        """Bytes by which limits would be exceeded, added up; 0 where everything fits."""
        return self.excess_of(self.bytes_by_party(holders, *shadows)) if self._ladders else 0

    def excess_of(self, needs: Mapping[str, int]) -> int:
        """Return the excess, from the needs of each party."""
        total = 0
        for ladder in self._ladders:
            used = 0
            for size, party in ladder:
                used += needs.get(party, 0)
                total += max(0, used - size)
        return total

    def free_bytes(self, party: str, needs: Mapping[str, int]) -> int | None:
        """Return the bytes that a party could still use; None where it has no limit."""
        bytes_left: int | None = None
        for ladder in self._ladders:
            used, is_in = 0, False
            for size, other in ladder:
                used += needs.get(other, 0)
                is_in = is_in or other == party
                if is_in:
                    bytes_left = size - used if bytes_left is None else min(bytes_left, size - used)
        return bytes_left

    def describe_shortages(self, holders: Mapping[int, str], *shadows: Mapping[int, str]) -> list[str]:
        """Name each party with too little memory, with its limit, its need and the roles that cause it."""
        needs = self.bytes_by_party(holders, *shadows)
        shortages = []
        for ladder in self._ladders:
            used, worst = 0, (0, "")
            for rung, (size, party) in enumerate(ladder):
                used += needs.get(party, 0)
                users = sorted(other for _, other in ladder[: rung + 1] if needs.get(other))
                if used - size > worst[0]:
                    roles = "; ".join(_roles_of(user, holders, *shadows) for user in users)
                    together = " together" if len(users) > 1 else ""
                    verbs = ("have", "need") if together else ("has", "needs")
                    names = " and ".join(users)
                    description = (
                        f"{names}{together} {verbs[0]} {_format_mib(size)} for stages "
                        f"and {verbs[1]} {_format_mib(used)} ({roles})"
                    )
                    worst = (used - size, description)
            if worst[1]:
                shortages.append(worst[1])
        return sorted(set(shortages))

    def check_fit(self, holders: Mapping[int, str], *shadows: Mapping[int, str]) -> None:
        """Refuse what does not fit."""
        short = self.describe_shortages(holders, *shadows)
        if short:
            raise ConfigError(f"memory: the stages do not fit: {'. '.join(short)}; {_ADVICE}").with_facts(
                code="PHX-C018"
            )


UNBOUNDED = Memory()
"""A memory into which everything fits."""


def _roles_of(party: str, holders: Mapping[int, str], *shadows: Mapping[int, str]) -> str:
    parts = []
    for verb, placed in (("holds", (holders,)), ("shadows", shadows)):
        stages = [str(stage) for stage in sorted(stage for roles in placed for stage in roles if roles[stage] == party)]
        if stages:
            parts.append(f"{verb} {', '.join(stages)}")
    return f"{party} {' and '.join(parts)}"


def _format_mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
