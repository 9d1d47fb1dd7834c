"""The assignment of stages to parties, a holder and a shadow each: at the start, and after a party is gone."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from phalanx.errors import NoHolderError
from phalanx.pipeline.assignment.memory import UNBOUNDED, Memory
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import Activation, Role


@dataclass(frozen=True)
class Assignment:
    """Holder and shadow of every stage; the owner's stages need no shadow, for the owner is trusted.

    The holder serves a stage: it sends, receives and computes its messages. The shadow has the other copy and audits.
    """

    holders: Mapping[int, str]
    shadows: Mapping[int, str]

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
        return tuple(s for s in sorted(self.holders) if party in (self.holders[s], self.shadows.get(s)))


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
    """Promote the shadows of what `gone` held, and find new shadows where they are missing then.

    Args:
        gone: The party that was evicted or lost.
        memory: The parties' room for the stages without a shadow.
    """
    holders = dict(assignment.holders)
    for stage, holder in assignment.holders.items():
        if holder != gone:
            continue
        successor = assignment.shadows.get(stage)
        if successor is None or successor == gone:
            raise NoHolderError(
                f"stage {stage}: {gone} is lost and had no shadow; resume from the last checkpoint with --resume"
            )
        holders[stage] = successor
    if not guarded:
        return Assignment(holders, {})
    remaining_shadows = {
        stage: shadow
        for stage, shadow in assignment.shadows.items()
        if shadow != gone and holders[stage] not in (shadow, OWNER)
    }
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
    holders, shadows = {}, {}
    for stage, holder in new.holders.items():
        had = [
            old.holders.get(stage),
            old.shadows.get(stage),
            *(name for confirmed_stage, name in confirmed if confirmed_stage == stage),
        ]
        holders[stage] = holder if holder in had else old.holders[stage]
        candidates = (new.shadows.get(stage), old.shadows.get(stage))
        able = [name for name in candidates if name and name in had and name in present and name != holders[stage]]
        if able and stage in new.shadows:
            shadows[stage] = able[0]
    return Assignment(holders, shadows)


def stages_lacking_state(late: Collection[str], roles: Sequence[Role]) -> set[int]:
    """Stages with a state for which a late party waits, for all that the owner knows, from another worker."""
    return {role.stage for role in roles if role.source != OWNER and not {*late}.isdisjoint(role.newcomers)}


def shadowed_by_owner(assignment: Assignment, disputed: Collection[int]) -> Assignment:
    """Return it with the owner as the shadow of disputed stages, and of every stage of a worker that has none.

    A party that lacks a state and its sender contradict each other without proof. The owner takes the receiver's place,
    and so sees for itself whether the sender delivers it: also where the former shadow is still there, for that one
    may be about to leave.
    """
    kept = {stage: shadow for stage, shadow in assignment.shadows.items() if stage not in disputed}
    return Assignment(assignment.holders, cover_stages(assignment.holders, kept, ()))


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
    return Assignment({role.stage: role.holder for role in roles}, shadows)


def _make_role(stage: int, new: Assignment, old: Assignment | None, reachable: Collection[str]) -> Role:
    present = [name for name in (new.holders[stage], new.shadows.get(stage)) if name is not None]
    had = [] if old is None else [old.holders[stage], old.shadows.get(stage)]
    informed = [name for name in present if name in had]
    giving = [] if old is None or old.holders[stage] not in reachable else [old.holders[stage]]
    # what the owner has it sends itself: of its word there is no dispute
    source = OWNER if OWNER in had else next(iter([*giving, *informed]), OWNER)
    return Role(
        stage=stage,
        holder=new.holders[stage],
        shadow=new.shadows.get(stage),
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
            candidates = _shadow_candidates(stage, holders, shadows, workers)
            excess = {name: memory.excess_bytes(holders, {**shadows, stage: name}) for name in candidates}
            # of several with the least excess, which is none in most runs, the first
            shadows[stage] = min(candidates, key=excess.__getitem__)
    return shadows


def _shadow_candidates(
    stage: int, holders: Mapping[int, str], shadows: Mapping[int, str], workers: Sequence[str]
) -> list[str]:
    """Return candidates: spares first, then workers with an adjacent stage, then all other workers, then the owner."""
    others = [worker for worker in workers if worker != holders[stage]]
    busy = {*holders.values(), *shadows.values()}
    spares = [worker for worker in others if worker not in busy]
    next_door = [holders[n] for n in (stage + 1, stage - 1) if n in holders and holders[n] in others]
    return [*spares, *next_door, *others, OWNER]
