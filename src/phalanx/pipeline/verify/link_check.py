"""The jumping connection as an equality of digests: what one stage sent is what the next one used."""

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.verify.facts import Judgement, StepFacts
from phalanx.pipeline.verify.ledger import MessageKey

_BOTH: tuple[tuple[Direction, int], ...] = (("forward", 1), ("backward", -1))


def compare_links(facts: StepFacts) -> Judgement | None:
    """Compare what every stage committed to have sent with what the adjacent one committed to have used.

    Returns:
        A judgement of the first contradiction: of a sender that equivocated, or a receiver that shows no header at all.
        Headers that the sender did not sign are found when a commitment is taken.
    """
    stages = len(facts.plan.stages)
    for source in range(stages):
        for direction, offset in _BOTH:
            target = source + offset
            if not 0 <= target < stages:
                continue
            for microbatch in range(facts.plan.microbatches):
                if facts.holder(source) == facts.holder(target) == OWNER:
                    continue
                judgement = _compare(facts, (source, direction, microbatch), target)
                if judgement is not None:
                    return judgement
    return None


def _compare(facts: StepFacts, key: MessageKey, target: int) -> Judgement | None:
    source, direction, microbatch = key
    sender, receiver = facts.holder(source), facts.holder(target)
    said, received = facts.ledger.said_digest(key), facts.ledger.messages.get(key)
    where = f"stage {source}, microbatch {microbatch}, {direction}"
    if received is None:
        reason = f"{where}: {receiver} committed to the step without this input"
        return facts.judgement("forgery", receiver, target, reason)
    if said == received.digest:
        return None
    headers = {"message": received.header}
    reason = f"{where}: {sender} committed to another tensor than it sent"
    return facts.judgement("equivocation", sender, source, reason, accuser=receiver, headers=headers)
