"""A stage's state or weights, as its two copies have them and as both parties have signed them."""

from phalanx.errors import PeerLostError, VerificationError
from phalanx.pipeline.protocol.messages import FetchBulk, Purpose
from phalanx.pipeline.protocol.needs import TensorsNeed, task
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.verify.facts import StepFacts


@task
async def collect_agreed(facts: StepFacts, stage: int, purpose: Purpose) -> StageCopy:
    """Fetch a stage's state or weights from its holder, or from the other copy where the holder does not bring it.

    Raises:
        VerificationError: The bytes are not those of the agreed state.
        PeerLostError: No answer came in time.
    """
    # a shadow that could take over has the same state
    has_heir = stage in facts.assignment.shadows and not facts.plan.guard.one_optimizer
    parties = (facts.holder(stage), *((facts.shadow(stage),) if has_heir else ()))
    reason: PeerLostError | VerificationError = PeerLostError(
        f"stage {stage}: {facts.holder(stage)} did not send its {purpose} in time"
    )
    for party in parties:
        copy = await _fetch(facts, party, stage, purpose)
        if copy is not None and _is_agreed(facts, copy, purpose):
            return copy
        if copy is not None:
            reason = VerificationError(
                f"stage {stage}: {party} sent a {purpose} that is not the one it signed; not used"
            )
            facts.observe("refused", {"party": party, "error": type(reason).__name__, "reason": str(reason)})
    raise reason


async def _fetch(facts: StepFacts, party: str, stage: int, purpose: Purpose) -> StageCopy | None:
    copy = StageCopy.empty(facts.plan, stage)
    request = FetchBulk(epoch=facts.ledger.epoch, step=facts.ledger.step, stage=stage, purpose=purpose)
    found = await TensorsNeed(party, request, copy.state() if purpose == "state" else copy.weights())
    if found is None:
        return None
    if purpose == "state":
        copy.load(*found)
    else:
        copy.load_weights(found[0])
    return copy


def _is_agreed(facts: StepFacts, copy: StageCopy, purpose: Purpose) -> bool:
    agreed = facts.agreed.get(copy.spec.index)
    if agreed is None:
        return True
    return copy.digest() == agreed if purpose == "state" else copy.weights_digest() == agreed.weights
