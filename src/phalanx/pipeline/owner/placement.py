"""The placement of stages into the parties' memory: at the start, when a party is gone, when workers come and go."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from phalanx.pipeline.assignment.assignment import Assignment, add_second_shadows, first_assignment, promote_shadows
from phalanx.pipeline.assignment.fit import fit_assignment
from phalanx.pipeline.assignment.memory import Memory
from phalanx.pipeline.assignment.rebalance import PaceMeter, rebalance_assignment
from phalanx.pipeline.assignment.stage_memory import stage_footprints
from phalanx.pipeline.membership.members import Members
from phalanx.pipeline.plan import StepPlan


class Placement:
    """A maker of assignments that fit into the parties' memory.

    A run does not begin with an assignment that exceeds the claimed memory. Later it goes on with the smallest excess:
    parties may have been too careful, and one that really has too little is lost like any other.
    """

    def __init__(self, plan: StepPlan, members: Members) -> None:
        self._plan = plan
        self._members = members
        self._footprints = stage_footprints(plan)
        self._is_short = False

    @property
    def party_memory(self) -> Memory:
        """The memory that stages need, and that every party has that has come so far."""
        return Memory(self._footprints, self._members.memory_by_party)

    def assign_first(self, workers: Sequence[str], *, may_exceed: bool) -> Assignment:
        """Return the first assignment.

        Raises:
            ConfigError: Nothing fits, and it may not exceed what there is.
        """
        plan, memory = self._plan, self.party_memory
        guarded = plan.guard.is_enabled
        assignment = first_assignment(len(plan.stages), workers, guarded=guarded, memory=memory)
        assignment = self._pair_classes(assignment, workers)
        fitted = fit_assignment(assignment, workers, memory)
        if fitted is not assignment:
            # what fits may be all with one worker
            fitted = self._pair_classes(rebalance_assignment(fitted, workers, guarded=guarded, memory=memory), workers)
        fitted = self._add_second_shadows(fitted, None, workers)
        if not may_exceed:
            memory.check_fit(fitted.holders, fitted.shadows, fitted.second_shadows)
        return fitted

    def assign_without(self, old: Assignment, gone: str, workers: Sequence[str]) -> Assignment:
        """Let shadows take over the stages of `gone`; others with room shadow uncovered ones."""
        guard, memory = self._plan.guard, self.party_memory
        successors = promote_shadows(old, gone, workers, guarded=guard.is_enabled, memory=memory)
        fitted = self._pair_classes(fit_assignment(successors, workers, memory, holders_stay=True), workers)
        return self._add_second_shadows(fitted, old, workers)

    def assign_regrouped(self, old: Assignment, workers: Sequence[str], balance: PaceMeter) -> Assignment:
        """Move stages to the parties that are there now, as few as possible."""
        guard = self._plan.guard
        new = rebalance_assignment(
            old, workers, guarded=guard.is_enabled, costs=balance.costs, pace=balance.pace, memory=self.party_memory
        )
        return self._add_second_shadows(self._pair_classes(new, workers), old, workers)

    def _add_second_shadows(self, new: Assignment, old: Assignment | None, workers: Sequence[str]) -> Assignment:
        has_seconds = self._plan.guard.shadows > 1
        return add_second_shadows(new, old, workers, self.party_memory) if has_seconds else new

    def _pair_classes(self, assignment: Assignment, workers: Sequence[str]) -> Assignment:
        """Replace shadows of another numeric class than their stage by workers of its class that have room for it."""
        classes, memory, holders = self._members.numeric_classes, self.party_memory, assignment.holders
        shadows = dict(assignment.shadows)
        for stage, shadow in sorted(assignment.shadows.items()):
            holder = holders[stage]
            if classes.get(holder) == classes.get(shadow):
                continue
            crowded = memory.excess_bytes(holders, shadows)
            alike = [name for name in workers if name != holder and classes.get(name) == classes.get(holder)]
            able = [name for name in alike if memory.excess_bytes(holders, {**shadows, stage: name}) <= crowded]
            roles = Counter([*holders.values(), *shadows.values()])
            # the first of those with the fewest roles
            shadows[stage] = min(able, key=roles.__getitem__, default=shadow)
        return assignment if shadows == assignment.shadows else replace(assignment, shadows=shadows)

    def is_crowded(self, old: Assignment, workers: Sequence[str], balance: PaceMeter) -> bool:
        """Whether a party was given more than it had room for by `shortages`, still has, and others have room."""
        if not self._is_short:
            return False
        memory = self.party_memory
        excess = memory.excess_bytes(old.holders, old.shadows, old.second_shadows)
        if not excess:
            return False
        new = self.assign_regrouped(old, workers, balance)
        return memory.excess_bytes(new.holders, new.shadows, new.second_shadows) < excess

    def list_shortages(self, assignment: Assignment) -> list[str]:
        """Say in sentences which parties are given more than they say they have."""
        placed = (assignment.holders, assignment.shadows, assignment.second_shadows)
        sentences = self.party_memory.describe_shortages(*placed)
        self._is_short = bool(sentences)
        return sentences
