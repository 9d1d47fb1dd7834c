"""A stage's state or weights, as its holder has them and as holder and shadow have signed them."""

from phalanx.errors import PeerLostError, VerificationError
from phalanx.pipeline.courier import Courier
from phalanx.pipeline.docket import Docket
from phalanx.pipeline.messages import FetchBulk, Purpose
from phalanx.pipeline.stage_copy import StageCopy


def collect_from_holder(docket: Docket, courier: Courier, stage: int, purpose: Purpose) -> StageCopy:
    """Fetch a stage's state or weights from who holds it.

    Raises:
        VerificationError: The bytes are not those of the agreed state.
        PeerLostError: No answer came in time.
    """
    holder, copy = docket.holder(stage), StageCopy.empty(docket.plan, stage)
    request = FetchBulk(epoch=docket.ledger.epoch, step=0, stage=stage, purpose=purpose)
    found = courier.collect(holder, request, copy.state() if purpose == "state" else copy.weights())
    if found is None:
        raise PeerLostError(f"stage {stage}: {holder} did not send its {purpose} in time")
    if purpose == "state":
        copy.load(*found)
    else:
        copy.load_weights(found[0])
    agreed = docket.agreed.get(stage)
    if agreed is None:
        return copy
    same = copy.digest() == agreed if purpose == "state" else copy.weights_digest() == agreed.weights
    if not same:
        raise VerificationError(f"stage {stage}: {holder} sent a {purpose} that is not the one it signed; not used")
    return copy
