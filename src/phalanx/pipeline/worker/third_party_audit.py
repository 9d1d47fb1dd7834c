"""An auditor's way to a stage that it has no copy of: fetch the agreed weights, audit one step, forget them."""

from dataclasses import dataclass

from phalanx.errors import FrameError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Audit, Bulk, FetchBulk, PassedOnHeader, StateDigest
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.protocol.tensor_stream import BulkReceiver
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.worker.context import PartyContext
from phalanx.pipeline.worker.shadow import ShadowStage


@dataclass
class _FetchedStage:
    """One audit that waits for weights."""

    copy: StageCopy
    state: StateDigest
    permit: PassedOnHeader | None
    sources: list[str]
    """Parties that may still be asked."""
    incoming: BulkReceiver
    asked: str = ""
    """The party that was asked last; no other one but the owner may send parts in its place."""


class ThirdPartyAudits:
    """The weights under way for stages that the owner asked this party to audit."""

    def __init__(self, context: PartyContext) -> None:
        self._context = context
        self._open: dict[int, _FetchedStage] = {}

    def clear(self) -> None:
        """Drop everything: the epoch has changed."""
        self._open.clear()

    def permit(self, stage: int) -> PassedOnHeader | None:
        """The owner's permit, to show to a party that is asked for a tensor of this stage."""
        found = self._open.get(stage)
        return None if found is None else found.permit

    def expects(self, stage: int) -> bool:
        """Whether the owner asked for this stage to be audited from outside in the present step."""
        found = self._open.get(stage)
        return found is not None and found.state.step == self._context.roles.step

    def begin(self, received: ReceivedMessage, message: Audit, state: StateDigest) -> None:
        """Ask the shadow, if it has them, for the weights; and the stage itself if the shadow brings other ones."""
        roles, stage = self._context.roles, message.stage
        known = self._open.get(stage)
        if known is not None and known.state == state:
            # an odd message was audited in this step before
            return
        copy = roles.empty_copy(stage)
        permit = None if received.header is None else to_signed(received.header)
        holder, shadow = roles.assignment.holders.get(stage), roles.assignment.shadows.get(stage)
        has_weights = not self._context.plan.guard.keeps_snapshots
        sources = [name for name in (holder, shadow if has_weights else None) if name is not None]
        self._open[stage] = _FetchedStage(copy, state, permit, sources, BulkReceiver(copy.weights()))
        self._ask_next(stage)

    def take(self, received: ReceivedMessage, message: Bulk) -> None:
        """Take a part of the weights; once they are whole and the agreed ones, the stage can be audited.

        Raises:
            FrameError: They were not asked for, or are not those that were agreed on.
        """
        stage, roles = message.stage, self._context.roles
        fetched = self._open.get(stage)
        if (
            fetched is None
            or received.sender not in (fetched.asked, OWNER)
            or stage in roles.fetched_stages
            or fetched.state.step != roles.step
        ):
            raise FrameError(
                f"{self._context.name}: {received.sender!r} sent weights of stage {stage}, which it was not asked for"
            )
        if message.offset == 0:
            fetched.incoming = BulkReceiver(fetched.copy.weights())
        tensors = fetched.incoming.add(message.offset, message.total, received.payload)
        if tensors is None:
            return
        fetched.copy.load_weights(tensors)
        if fetched.copy.weights_digest() != fetched.state.weights:
            self._ask_next(stage)
            raise FrameError(f"{self._context.name}: {received.sender!r} sent other weights than were agreed on")
        fetched.copy.optimizer.num_steps = fetched.state.step
        roles.fetched_stages[stage] = ShadowStage(fetched.copy)

    def _ask_next(self, stage: int) -> None:
        fetched = self._open[stage]
        if fetched.sources:
            request = FetchBulk(
                epoch=self._context.roles.epoch,
                step=fetched.state.step,
                stage=stage,
                purpose="weights",
                permit=fetched.permit,
            )
            fetched.asked = fetched.sources.pop()
            self._context.post(fetched.asked, request, ())
