"""Accomplices: auditors that reported the very bytes which another party was convicted of."""

from dataclasses import replace

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.verify.facts import Judgement, StepFacts, present
from phalanx.planner.schedules import Direction


def vouched(facts: StepFacts, stage: int, microbatch: int, direction: Direction) -> bool:
    """Whether the auditor with the other copy reported the very digest that was committed to."""
    ledger = facts.ledger
    report = ledger.reports.get((stage, microbatch, facts.shadow(stage)))
    said = None if report is None else report.digests.get(direction)
    return said is not None and said == ledger.messages[(stage, direction, microbatch)].digest


def accomplice(facts: StepFacts, found: Judgement) -> Judgement | None:
    """The auditor that vouched for a message which was judged wrong; None when it did not."""
    verdict = found.verdict
    stage, microbatch, direction = verdict.stage, verdict.microbatch, verdict.direction
    if microbatch is None or direction is None or verdict.offence != "message":
        return None
    auditor = facts.shadow(stage)
    if auditor in (OWNER, verdict.accuser) or not vouched(facts, stage, microbatch, direction):
        return None
    where = f"stage {stage}, microbatch {microbatch}, {direction}"
    reason = f"{where}: {auditor} vouched for the wrong tensor of {verdict.party}"
    update = {"party": auditor, "offence": "collusion", "reason": reason}
    tensors = dict(found.compared.tensors)
    if "claimed" in tensors:
        tensors["accuser"] = tensors["claimed"].clone()
    shown = replace(found.compared, tensors=tensors)
    report = facts.record.header_of(auditor, facts.ledger.reports[(stage, microbatch, auditor)])
    headers = dict(found.headers) | present({"report": report})
    return Judgement(verdict.model_copy(update=update), shown, headers)


def vouched_for_gradient(facts: StepFacts, stage: int) -> Judgement | None:
    """The auditor that claims to have recomputed a made-up weight gradient; None when it does not."""
    ledger, auditor = facts.ledger, facts.shadow(stage)
    lockstep = facts.plan.guard.upkeep.in_lockstep
    said = ledger.held.get(stage) if lockstep else ledger.step_audits.get((stage, auditor))
    commit = ledger.commits[stage]
    if said is None or auditor == OWNER or (said.gradient, said.norm_squared) != (commit.gradient, commit.norm_squared):
        return None
    holder = facts.holder(stage)
    reason = f"stage {stage}: {auditor} vouched for the made-up weight gradient of {holder} in step {ledger.step}"
    headers = {"commit": ledger.commit_header(stage), said.kind: facts.record.header_of(auditor, said)}
    return facts.judgement("collusion", auditor, stage, reason, headers=headers)
