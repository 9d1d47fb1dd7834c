"""Weight gradients of a stage with two copies: what each copy has of them, and what both apply."""

from torch import Tensor

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import GradientHeld
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.protocol.tensor_stream import digest_of_parts
from phalanx.pipeline.stage.gradient_norm import finite_norm_squared
from phalanx.pipeline.stage.replica_gradients import add_lanes
from phalanx.pipeline.worker.context import PartyContext
from phalanx.pipeline.worker.roles import Roles
from phalanx.pipeline.worker.shadow import ShadowStage


def whole_gradient(roles: Roles, stage: int) -> dict[str, Tensor] | None:
    """The gradient that this party's copy is to apply; None while a lane of it is missing.

    With one lane it is what the stage computed or what the shadow was given; with two it is the sum of both.
    """
    parts = [role.gradients for role in (roles.hosted.get(stage), roles.shadows.get(stage)) if role is not None]
    found = [part for part in parts if part is not None]
    return add_lanes(found) if found and len(found) == len(parts) else None


def gradient_of(roles: Roles, stage: int, lane: int, step: int) -> dict[str, Tensor] | None:
    """The gradient of one lane in this step or the last one, as far as this party has it."""
    holder, shadow = roles.hosted.get(stage), roles.shadows.get(stage)
    if shadow is None:
        return None if holder is None else holder.gradients
    role = holder if holder is not None and roles.own_share(stage)[1] == lane else shadow
    return role.last_gradients if step < role.copy.step else role.gradients or {}


def report_held(context: PartyContext, shadow: ShadowStage) -> None:
    """Tell the owner that the gradient of a share is here, as soon as the whole gradient's norm can be told as well."""
    whole = whole_gradient(context.roles, shadow.index)
    if whole is None:
        return
    held = GradientHeld(
        epoch=context.roles.epoch,
        step=context.roles.step,
        stage=shadow.index,
        lane=context.roles.audited_share(shadow.index)[1],
        norm_squared=finite_norm_squared(whole),
        gradient=digest_of_parts([part.fields.payload_digest for part in shadow.parts]),
        parts=tuple(to_signed(part) for part in shadow.parts),
    )
    context.post(OWNER, held, ())


def keep_evidence(roles: Roles, stage: int) -> None:
    """Before a shared stage's update: keep what a referee needs to redo it; the second copy does that for both."""
    holder, shadow = roles.hosted.get(stage), roles.shadows.get(stage)
    if holder is None or shadow is None:
        return
    if roles.assignment.shadows.get(stage) == roles.name:
        holder.copy.optimizer.snapshot()
        holder.last_gradients, shadow.last_gradients = holder.gradients or {}, shadow.gradients or {}
    shadow.begin()
