"""A stage's state or weights, as its two copies have them and as both parties have signed them."""

from phalanx.errors import PeerLostError, VerificationError
from phalanx.pipeline.courier import Courier
from phalanx.pipeline.docket import Docket
from phalanx.pipeline.messages import FetchBulk, Purpose
from phalanx.pipeline.stage_copy import StageCopy


def collect_agreed(docket: Docket, courier: Courier, stage: int, purpose: Purpose) -> StageCopy:
    """Fetch a stage's state or weights from who holds it, or from the other copy where the holder is gone.

    Raises:
        VerificationError: The bytes are not those of the agreed state.
        PeerLostError: No answer came in time.
    """
    party, copy = docket.holder(stage), StageCopy.empty(docket.plan, stage)
    request = FetchBulk(epoch=docket.ledger.epoch, step=docket.ledger.step, stage=stage, purpose=purpose)
    expected = copy.state() if purpose == "state" else copy.weights()
    found = courier.collect(party, request, expected)
    if found is None and stage in docket.assignment.shadows and not docket.plan.guard.one_optimizer:
        # the holder may have died since the last step; a shadow that could take over has the same state
        party = docket.shadow(stage)
        found = courier.collect(party, request, expected)
    if found is None:
        raise PeerLostError(f"stage {stage}: {docket.holder(stage)} did not send its {purpose} in time")
    if purpose == "state":
        copy.load(*found)
    else:
        copy.load_weights(found[0])
    agreed = docket.agreed.get(stage)
    if agreed is None:
        return copy
    same = copy.digest() == agreed if purpose == "state" else copy.weights_digest() == agreed.weights
    if not same:
        raise VerificationError(f"stage {stage}: {party} sent a {purpose} that is not the one it signed; not used")
    return copy
