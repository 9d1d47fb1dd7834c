"""The guarantees of the guard for each stage with its present roles: short fixed names, the strongest first."""

from collections.abc import Mapping

from phalanx.pipeline.assignment.assignment import Assignment
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.verify.facts import StepFacts

GUARANTEES: dict[str, str] = {
    "own": "the owner serves the stage",
    "bit-equal": "stage, shadow and owner compute the same bits; any other bit is a lie",
    "owner-shadowed": "stage and owner compute the same bits; only the owner has another copy",
    "bounded": "messages and weight gradients are compared within rounding, updates bit by bit",
    "messages-only": "messages and updates are compared, weight gradients are not",
    "unguarded": "the stage is not checked",
}
"""Names and meanings; a later one is weaker."""

_STRENGTH = {name: -place for place, name in enumerate(GUARANTEES)}


def weaker_guarantee(one: str, other: str) -> str:
    """The weaker one of two guarantees; a name that is not known counts as none."""
    return min(one, other, key=lambda name: _STRENGTH.get(name, -len(_STRENGTH)))


def guarantee_of(facts: StepFacts, assignment: Assignment, stage: int) -> str:
    """Return the guarantee of a stage with these roles.

    Args:
        facts: The run and every party's measured class.
    """
    guard, holder, shadow = facts.plan.guard, assignment.holders[stage], assignment.shadows.get(stage)
    rates = (guard.step_audit_rate, guard.owner_audit_rate)
    alike = shadow is not None and facts.bits_decide(holder) and facts.bits_decide(shadow)
    # the first that applies
    applicable = {
        "own": holder == OWNER,
        "unguarded": shadow is None or not guard.is_enabled,
        "messages-only": not guard.shadow_upkeep.in_lockstep and not any(rates),
        "bounded": not alike,
        "owner-shadowed": shadow == OWNER,
    }
    return next((name for name, applies in applicable.items() if applies), "bit-equal")


_IN_WORDS = {
    "own": "served by the owner",
    "bit-equal": "compared bit for bit with a second copy",
    "owner-shadowed": "compared bit for bit with the owner's copy",
    "bounded": "compared within rounding with a second copy",
    "messages-only": "compared by messages, weight gradients not checked",
    "unguarded": "not checked",
}


def describe_guarantees(guarantees: Mapping[int, str]) -> str:
    """Describe in words how each stage is checked, stages of one guarantee together."""
    groups: dict[str, list[str]] = {}
    for stage, name in guarantees.items():
        groups.setdefault(name, []).append(str(stage))
    return "; ".join(
        f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(stages)}: {_IN_WORDS[name]} ({name})"
        for name, stages in groups.items()
    )


class Guarantees:
    """The announcer of every stage's guarantee, at the start and whenever roles have changed it."""

    def __init__(self, facts: StepFacts) -> None:
        self.present: Mapping[int, str] = {}
        self._facts = facts

    def note_roles(self, assignment: Assignment, step: int) -> None:
        """Take note of the roles from a step on."""
        before, now = self.present, {s: guarantee_of(self._facts, assignment, s) for s in sorted(assignment.holders)}
        if now == before:
            return
        self.present = now
        stages = {str(stage): name for stage, name in now.items()}
        self._facts.observe("guarantees", {"step": step, "stages": stages, "said": describe_guarantees(now)})
        for stage, name in now.items():
            if name != before.get(stage, name) and weaker_guarantee(name, before[stage]) == name:
                body = {"step": step, "stage": stage, "before": before[stage], "now": name}
                self._facts.observe("guarantee_weaker", {**body, "meaning": GUARANTEES[name]})
