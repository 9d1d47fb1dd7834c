"""The jumping connection as an equality of digests: what one stage sent is what the next one used."""

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.verify.facts import Judgement, StepFacts
from phalanx.pipeline.verify.ledger import MessageKey

_BOTH: tuple[tuple[Direction, int], ...] = (("forward", 1), ("backward", -1))


def compare_links(docket: StepFacts) -> Judgement | None:
    """Compare what every stage committed to have sent with what the adjacent one committed to have used.

    Returns:
        A judgement of the first contradiction: of a sender that equivocated, or a receiver that shows no header at all.
        Headers that the sender did not sign are found when a commitment is taken.
    """
    stages = len(docket.plan.stages)
    for source in range(stages):
        for direction, offset in _BOTH:
            target = source + offset
            if not 0 <= target < stages:
                continue
            for microbatch in range(docket.plan.microbatches):
                if docket.server(source, microbatch) == docket.server(target, microbatch) == OWNER:
                    continue
                judgement = _compare(docket, (source, direction, microbatch), target)
                if judgement is not None:
                    return judgement
    return None


def _compare(docket: StepFacts, key: MessageKey, target: int) -> Judgement | None:
    source, direction, microbatch = key
    sender, receiver = docket.server(source, microbatch), docket.server(target, microbatch)
    (_, lane), (_, other) = docket.assignment.share(source, microbatch), docket.assignment.share(target, microbatch)
    said, received = docket.ledger.said_digest(key, lane), docket.ledger.messages.get(key)
    where = f"stage {source}, microbatch {microbatch}, {direction}"
    if received is None:
        reason = f"{where}: {receiver} committed to the step without this input"
        return docket.judgement("forgery", receiver, target, reason, lane=other)
    if said == received.digest:
        return None
    headers = {"message": received.header}
    reason = f"{where}: {sender} committed to another tensor than it sent"
    return docket.judgement("equivocation", sender, source, reason, accuser=receiver, lane=lane, headers=headers)
