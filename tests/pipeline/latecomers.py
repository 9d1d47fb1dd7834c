"""Honest auditors with late reports, so that what a step is applied before is certain and no matter of speed."""

from dataclasses import replace

from phalanx.pipeline.protocol.messages import AuditReport, Ready, StepAudited, UpdateReport
from phalanx.testing import Actor


def late(actor=None, *, until=UpdateReport, holds=lambda message: True):
    """What an auditor has recomputed leaves only behind the next message of a kind, by default the update's digest.

    Before the decision of the step no party sends that: with audits that must not lag the step would never end.
    """
    actor, kept = actor or Actor(), []

    def rewrite(outgoing):
        message = outgoing.message
        if isinstance(message, Ready):
            kept.clear()
        if isinstance(message, AuditReport | StepAudited) and holds(message):
            kept.extend(actor.rewrite(outgoing))
            return ()
        behind = list(kept) if isinstance(message, until) else []
        del kept[: len(behind)]
        return (*actor.rewrite(outgoing), *behind)

    return replace(actor, rewrite=rewrite)


def all_late(actors, stages=4):
    """Every worker of a company is late with its audits; some are given."""
    return {stage: late(actors.get(stage)) for stage in range(1, stages - 1)}
