"""The checks of each stage's work in one applied step: facts, for the account of verified states."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from phalanx.pipeline.assignment.assignment import Share
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.verify.facts import StepFacts

Check = Literal["messages", "whole_step", "third_party", "owner", "state"]
CHECKS: dict[Check, str] = {
    "messages": "drawn messages were recomputed by the other copy of the stage",
    "whole_step": "all messages and the weight gradient were recomputed by the other copy of the stage",
    "third_party": "the same by a worker without a copy of the stage",
    "owner": "the same by the owner itself, with the update",
    "state": "both copies agreed on the weights and the optimizer's state that the step began with",
}
"""Every kind of check, with what it is."""


@dataclass(frozen=True)
class StageChecks:
    """The checks of one worker's stage in one step.

    Attributes:
        made: Which checks.
        rests_on: By party that served a part of the stage: the parties on which it rests that all of its work was
            recomputed, update included. Empty where the owner did so itself, None where no party did.
    """

    made: frozenset[Check]
    rests_on: Mapping[str, frozenset[str] | None]


NoteChecks = Callable[[int, Mapping[int, StageChecks]], None]
"""Told of every step that is applied, those included that are done again, with its stages at workers."""


def step_checks(facts: StepFacts) -> dict[int, StageChecks]:
    """Return the checks by stage; audits that lag count as made, for their step is undone if one fails."""
    assignment = facts.assignment
    found = {}
    for stage in sorted(assignment.holders):
        shares = [share for share in assignment.shares_of(stage) if assignment.server_of(share) != OWNER]
        if shares:
            rests_on = {assignment.server_of(share): _rests_on(facts, share) for share in shares}
            found[stage] = StageChecks(_made(facts, stage), rests_on)
    return found


def _made(facts: StepFacts, stage: int) -> frozenset[Check]:
    ledger = facts.ledger
    if stage not in facts.watched:
        return frozenset()
    auditors = {auditor for audited, _, auditor in ledger.awaited_audits if audited == stage}
    near = {auditor for auditor in auditors if facts.has_copy(auditor, stage)}
    whole = {auditor for audited, auditor in ledger.awaited_step_audits if audited == stage}
    made: dict[Check, bool] = {
        "messages": bool(near),
        "whole_step": bool(whole & near) or _in_lockstep(facts),
        "third_party": bool(auditors - near),
        "owner": stage in ledger.owner_audited,
        "state": _compares_states(facts, stage),
    }
    return frozenset(check for check, is_made in made.items() if is_made)


def _rests_on(facts: StepFacts, share: Share) -> frozenset[str] | None:
    ledger, stage = facts.ledger, share[0]
    if stage in ledger.owner_audited:
        return frozenset()
    # the update is the other copy's to check, and where it is not compared the owner alone can
    if stage not in facts.watched or facts.plan.guard.one_optimizer or not _compares_states(facts, stage):
        return None
    whole = {auditor for audited, auditor in ledger.awaited_step_audits if audited == stage}
    other = facts.assignment.auditor_of(share)
    if other in whole or _in_lockstep(facts):
        return frozenset({other} - {OWNER})
    return frozenset({other, *whole} - {OWNER}) if any(not facts.has_copy(name, stage) for name in whole) else None


def _in_lockstep(facts: StepFacts) -> bool:
    """Whether the other copy recomputes everything in every step."""
    return facts.plan.guard.audits and facts.plan.guard.shadow == "lockstep"


def _compares_states(facts: StepFacts, stage: int) -> bool:
    """Whether two parties must have signed the same state for the step to be applied."""
    guard, holder, shadow = facts.plan.guard, facts.holder(stage), facts.shadow(stage)
    return facts.same_class(holder, shadow) and (not guard.keeps_snapshots or guard.hands_on(facts.ledger.step))
