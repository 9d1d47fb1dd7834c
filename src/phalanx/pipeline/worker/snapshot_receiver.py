"""Upkeep `snapshot` at the shadow: take what the stage sends every so many steps, and say what it is."""

from phalanx.errors import FrameError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Bulk, WeightsHeld
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.protocol.tensor_stream import may_continue
from phalanx.pipeline.worker.roles import PartyContext


class SnapshotReceiver:
    """Snapshots of other parties' stages as they arrive."""

    def __init__(self, context: PartyContext) -> None:
        self._context = context
        self._kept = context.roles.kept

    def is_early(self, message: Bulk) -> bool:
        """Whether a snapshot comes before it is known here that its last step is verified."""
        kept = self._kept.get(message.stage)
        return kept is not None and message.step > kept.verified

    def take(self, received: ReceivedMessage, message: Bulk) -> None:
        """Take a part of a snapshot; when all are here, tell the owner what was sent.

        Raises:
            FrameError: It is not from the holder, not due, or came before.
        """
        context, roles = self._context, self._context.roles
        kept = self._kept.get(message.stage)
        from_holder = received.sender in (roles.assignment.holders.get(message.stage), OWNER)
        awaited = (
            kept is not None
            and message.step == kept.verified
            and context.plan.guard.hands_on(message.step)
            and not kept.has(message.step)
            and may_continue(kept.source, received.sender, message.offset)
        )
        if kept is None or not awaited or not from_holder:
            raise FrameError(
                f"{context.name}: {received.sender!r} sent a snapshot of stage {message.stage} after {message.step} "
                f"steps; expected those of {sorted(self._kept)} every {context.plan.guard.snapshot_every} steps, once"
            )
        with context.timer.phase("shadow_receive"):
            if message.offset == 0:
                # the owner hands on what the holder did not send, from its beginning
                kept.restart(received.sender)
            is_whole = kept.add(message.step, message.offset, message.total, received.payload)
            # only now: a part that does not fit is none, and would spoil what the others prove
            if received.header is not None:
                kept.parts.append(received.header)
            if not is_whole:
                return
            state = kept.digest(message.step)
        held = WeightsHeld(
            epoch=roles.epoch,
            step=message.step,
            stage=kept.index,
            state=state,
            parts=tuple(to_signed(part) for part in kept.parts),
        )
        context.post(OWNER, held, ())

    def applied(self, step: int) -> None:
        """A step is verified; a party that only keeps snapshots is then at the next one."""
        roles = self._context.roles
        for kept in self._kept.values():
            kept.applied(step)
        if self._kept and not roles.hosted and self._context.name != OWNER:
            roles.step = step + 1
