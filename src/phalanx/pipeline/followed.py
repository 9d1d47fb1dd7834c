"""L3 with upkeep `update`: the weights that a stage sends must be those whose digest it signs."""

from phalanx.pipeline.bulk import parts
from phalanx.pipeline.docket import Docket, Judgement
from phalanx.pipeline.evidence import Exhibit
from phalanx.pipeline.messages import Bulk, StateDigest, WeightsHeld
from phalanx.pipeline.referee import Referee
from phalanx.pipeline.sent_weights import part_name
from phalanx.pipeline.signed import to_signed
from phalanx.pipeline.stage_copy import trained_digest
from phalanx.pipeline.transfer import is_whole_transfer
from phalanx.security.crypto import digest_hex
from phalanx.transport import SignedHeader


class FollowedWeights:
    """Compares what a stage signed with what its shadow was sent.

    Guarantees:
        A stage that sends other weights than those whose digest it signs is named, by its own signatures.
        Does not tell whether the update was right: the owner's audits do, at their rate.

    Attributes:
        shown: What each shadow says that it was sent after the last update, by stage.
    """

    def __init__(self, docket: Docket, referee: Referee) -> None:
        self.shown: dict[int, WeightsHeld] = {}
        self._docket = docket
        self._referee = referee

    def weigh(self, stage: int, signed: StateDigest, taken: StateDigest) -> Judgement | None:
        """Compare two digests of one stage's weights.

        Args:
            stage: The stage.
            signed: Of its holder.
            taken: Of its shadow.

        Returns:
            The guilty one of the two; None when weights are equal.
        """
        docket = self._docket
        holder, shadow = docket.holder(stage), docket.shadow(stage)
        before = docket.before.get(stage)
        if before is not None and _frozen(signed) != _frozen(before):
            reason = f"stage {stage}: {holder} signed other frozen weights than those that it began with"
            return docket.judgement("state", holder, stage, reason, accuser=shadow)
        if signed.weights == taken.weights:
            return None
        docket.observe("alarm", {"step": docket.ledger.step, "stage": stage, "kind": "state", "accuser": shadow})
        copy = self._referee.weights(docket.ledger.epoch, taken.step, stage, shadow, taken)
        headers = self._signed_parts(stage, holder)
        digests = [] if copy is None else [digest_hex(*part) for _, _, part in parts(copy.trained())]
        if copy is None or not headers or digests != [header.fields.payload_digest for header in headers]:
            reason = f"stage {stage}: {shadow} has other weights than those that it was sent"
            return docket.judgement("state", shadow, stage, reason, accuser=holder)
        reason = f"stage {stage}: {holder} sent other weights than those whose digest it signed"
        named = {part_name(number): to_signed(header) for number, header in enumerate(headers)}
        judgement = docket.judgement("state", holder, stage, reason, accuser=shadow, headers=named)
        judgement.exhibit = Exhibit(weights=taken.weights, stage=copy.trained())
        return judgement

    def _signed_parts(self, stage: int, holder: str) -> list[SignedHeader]:
        """Headers of the holder's transfer, in order; none when they are not all its own."""
        shown = self.shown.get(stage)
        if shown is None:
            return []
        opened = [self._docket.signed_by(part, holder) for part in shown.parts]
        headers = [header for header in opened if header is not None]
        about = Bulk(epoch=shown.epoch, step=shown.step, stage=stage, purpose="update", offset=0, total=0)
        whole = len(headers) == len(opened) and is_whole_transfer(headers, about)
        return headers if whole else []


def _frozen(state: StateDigest) -> str:
    return state.weights.removesuffix(trained_digest(state))
