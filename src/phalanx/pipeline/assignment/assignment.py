"""The assignment of stages to parties, a holder and a shadow each: at the start, and after a party is gone."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from phalanx.errors import NoHolderError
from phalanx.pipeline.assignment.memory import UNBOUNDED, Memory
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import Activation, Role


@dataclass(frozen=True)
class Assignment:
    """Holder and shadows of every stage; the owner's stages need no shadow, for the owner is trusted.

    The holder serves a stage: it sends, receives and computes its messages. The shadow has the other copy and audits.
    With ``guard.shadows = 2`` a second shadow has a third copy, of each stage whose holder and shadow are workers.
    """

    holders: Mapping[int, str]
    shadows: Mapping[int, str]
    second_shadows: Mapping[int, str] = field(default_factory=dict)

    def shadows_of(self, stage: int) -> tuple[str, ...]:
        """The shadows of a stage, the auditor first."""
        return tuple(roles[stage] for roles in (self.shadows, self.second_shadows) if stage in roles)

    def parties_of(self, stage: int) -> tuple[str, ...]:
        """Every party with a copy of a stage, the holder first."""
        return (*(() if stage not in self.holders else (self.holders[stage],)), *self.shadows_of(stage))

    def link_of(self, message: Activation) -> tuple[str, str] | None:
        """Return sender and receiver of a tensor; None when it is not of two adjacent stages."""
        neighbour = message.source + (1 if message.direction == "forward" else -1)
        if message.target != neighbour or not self.holders.keys() >= {message.source, message.target}:
            return None
        return self.holders[message.source], self.holders[message.target]

    def held_by(self, party: str) -> list[int]:
        """The stages that a party holds."""
        return [stage for stage in sorted(self.holders) if self.holders[stage] == party]

    def copies_of(self, party: str) -> tuple[int, ...]:
        """The stages that a party has a copy of."""
        return tuple(stage for stage in sorted(self.holders) if party in self.parties_of(stage))


def first_assignment(
    num_stages: int, workers: Sequence[str], *, guarded: bool, memory: Memory = UNBOUNDED
) -> Assignment:
    """Give first and last stage to the owner, the middle ones to workers in order; too few workers hold several each.

    Workers beyond one for each middle stage are spares. The shadows depend on `memory`, the holders do not.
    """
    holders = {stage: OWNER for stage in range(num_stages)}
    middle = range(1, num_stages - 1)
    busy = workers[: len(middle)]
    for n, stage in enumerate(middle if busy else ()):
        holders[stage] = busy[n * len(busy) // len(middle)]
    if not guarded:
        return Assignment(holders, {})
    return Assignment(holders, cover_stages(holders, {}, workers, memory))


def promote_shadows(
    assignment: Assignment,
    gone: str,
    workers: Sequence[str],
    *,
    guarded: bool,
    memory: Memory = UNBOUNDED,
) -> Assignment:
    """Promote the shadows of what `gone` held or shadowed, and find new ones where they are missing then.

    Args:
        gone: The party that was evicted or lost.
        memory: The parties' room for the stages without a shadow.
    """
    holders, remaining_shadows = dict(assignment.holders), dict[int, str]()
    for stage, holder in assignment.holders.items():
        copies = [name for name in assignment.shadows_of(stage) if name != gone]
        if holder == gone and not copies:
            raise NoHolderError(
                f"stage {stage}: {gone} is lost and had no shadow; resume from the last checkpoint with --resume"
            )
        if holder == gone:
            holders[stage] = copies.pop(0)
        if copies and holders[stage] not in (copies[0], OWNER):
            remaining_shadows[stage] = copies[0]
    if not guarded:
        return Assignment(holders, {})
    return Assignment(holders, cover_stages(holders, remaining_shadows, workers, memory))


def settle_assignment(
    new: Assignment, old: Assignment, present: Collection[str], confirmed: Collection[tuple[int, str]] = ()
) -> Assignment:
    """Return what stands of an interrupted change of roles: copies that were there before, or are the agreed ones.

    Args:
        old: The one before; a replaced party still has its copy.
        present: Every party that still takes part.
        confirmed: Parties new to a stage that have signed for its agreed state, with the stage.
    """
    holders, shadows, second_shadows = {}, {}, {}
    for stage, holder in new.holders.items():
        had = [*old.parties_of(stage), *(name for of_stage, name in confirmed if of_stage == stage)]
        holders[stage] = holder if holder in had else old.holders[stage]
        candidates = dict.fromkeys((*new.shadows_of(stage), *old.shadows_of(stage)))
        able = [name for name in candidates if name in had and name in present and name != holders[stage]]
        if able and stage in new.shadows:
            shadows[stage] = able[0]
        if len(able) > 1 and stage in new.second_shadows:
            second_shadows[stage] = able[1]
    return Assignment(holders, shadows, second_shadows)


def stages_lacking_state(late: Collection[str], roles: Sequence[Role]) -> set[int]:
    """Stages with a state for which a late party waits, for all that the owner knows, from another worker."""
    return {role.stage for role in roles if role.source != OWNER and not {*late}.isdisjoint(role.newcomers)}


def shadowed_by_owner(assignment: Assignment, disputed: Collection[int]) -> Assignment:
    """Return it with the owner as the shadow of disputed stages, and of every stage of a worker that has none.

    A party that lacks a state and its sender contradict each other without proof. The owner takes the receiver's place,
    and so sees for itself whether the sender delivers it: also where the former shadow is still there, for that one
    may be about to leave.
    """
    kept, seconds = (
        {stage: shadow for stage, shadow in shadows.items() if stage not in disputed}
        for shadows in (assignment.shadows, assignment.second_shadows)
    )
    return Assignment(assignment.holders, cover_stages(assignment.holders, kept, ()), seconds)


def roles_of(new: Assignment, old: Assignment | None, reachable: Collection[str] = ()) -> tuple[Role, ...]:
    """Write an assignment as roles, which name the sender of each stage's state to parties that are new to it.

    Args:
        old: The one until now; None when every party begins anew.
        reachable: Parties that can send their former states, even where they hold the stage no more.
    """
    return tuple(_make_role(stage, new, old, reachable) for stage in sorted(new.holders))


def assignment_of(roles: Sequence[Role]) -> Assignment:
    """Read roles as an assignment."""
    shadows = {role.stage: role.shadow for role in roles if role.shadow is not None}
    second_shadows = {role.stage: role.second_shadow for role in roles if role.second_shadow is not None}
    return Assignment({role.stage: role.holder for role in roles}, shadows, second_shadows)


def _make_role(stage: int, new: Assignment, old: Assignment | None, reachable: Collection[str]) -> Role:
    present, had = new.parties_of(stage), () if old is None else old.parties_of(stage)
    informed = [name for name in present if name in had]
    giving = [] if old is None or old.holders[stage] not in reachable else [old.holders[stage]]
    # what the owner has it sends itself: of its word there is no dispute
    source = OWNER if OWNER in had else next(iter([*giving, *informed]), OWNER)
    return Role(
        stage=stage,
        holder=new.holders[stage],
        shadow=new.shadows.get(stage),
        second_shadow=new.second_shadows.get(stage),
        source=source,
        newcomers=tuple(name for name in present if name not in informed),
    )


def cover_stages(
    holders: Mapping[int, str], kept: Mapping[int, str], workers: Sequence[str], memory: Memory = UNBOUNDED
) -> dict[int, str]:
    """Find a shadow for every stage of a worker that has none.

    Args:
        memory: The parties' room for one; where none has enough, the party is chosen that exceeds its limit least.
    """
    shadows = dict(kept)
    for stage in sorted(holders):
        if holders[stage] != OWNER and stage not in shadows:
            candidates = _shadow_candidates(stage, holders, shadows.values(), workers)
            excess = {name: memory.excess_bytes(holders, {**shadows, stage: name}) for name in candidates}
            # of several with the least excess, which is none in most runs, the first
            shadows[stage] = min(candidates, key=excess.__getitem__)
    return shadows


def add_second_shadows(
    assignment: Assignment, old: Assignment | None, workers: Sequence[str], memory: Memory = UNBOUNDED
) -> Assignment:
    """Find a second shadow for every stage that two workers have a copy of.

    Args:
        old: The assignment until now; of several with the least excess of memory, parties with a copy come first.
    """
    holders, shadows, seconds = assignment.holders, assignment.shadows, dict[int, str]()
    for stage, shadow in sorted(shadows.items()):
        if OWNER in (holders[stage], shadow):
            continue
        others = [worker for worker in workers if worker != shadow]
        former = () if old is None else old.parties_of(stage)[::-1]
        candidates = [name for name in former if name in others and name != holders[stage]]
        candidates += _shadow_candidates(stage, holders, (*shadows.values(), *seconds.values()), others)
        excess = {name: memory.excess_bytes(holders, shadows, {**seconds, stage: name}) for name in candidates}
        seconds[stage] = min(candidates, key=excess.__getitem__)
    return replace(assignment, second_shadows=seconds)


def _shadow_candidates(
    stage: int, holders: Mapping[int, str], shadows: Collection[str], workers: Sequence[str]
) -> list[str]:
    """Return candidates: spares first, then workers with an adjacent stage, then all other workers, then the owner."""
    others = [worker for worker in workers if worker != holders[stage]]
    busy = {*holders.values(), *shadows}
    spares = [worker for worker in others if worker not in busy]
    next_door = [holders[n] for n in (stage + 1, stage - 1) if n in holders and holders[n] in others]
    return [*spares, *next_door, *others, OWNER]
