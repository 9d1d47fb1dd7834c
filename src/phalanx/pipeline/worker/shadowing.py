"""The stages that a party shadows: gradients come in, audits are done, the copy stays fresh."""

import contextlib
import functools

from torch import Tensor

from phalanx.errors import FrameError, SignatureError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.plan import BOUNDARY_DTYPE
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import (
    Activation,
    Audit,
    AuditReport,
    Bulk,
    Fetch,
    FetchReply,
    GradientHeld,
    MessageKey,
    StepAudited,
    target_of,
)
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.protocol.tensor_stream import digest_of_parts, may_continue, transfer_digest
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.tolerance.screen import Doubt
from phalanx.pipeline.worker.audit_queue import AuditInput, AuditQueue, AuditTask
from phalanx.pipeline.worker.request_handlers import find_sent
from phalanx.pipeline.worker.roles import PartyContext, Roles
from phalanx.pipeline.worker.stages import ShadowStage
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers, tensor_from


class ShadowedStages:
    """The shadowed stages of a party, kept at the step of their stage; they recompute ordered audits."""

    def __init__(self, context: PartyContext, roles: Roles) -> None:
        self._context = context
        self._roles = roles
        self._guard = context.plan.guard
        self._shadows = roles.shadows
        self._audits = AuditQueue()
        self._moved = False
        self._shape = context.plan.hidden_shape

    def drop_audits(self) -> None:
        """Drop every audit: the epoch has changed."""
        self._audits.drop_tasks()

    # --- upkeep ---------------------------------------------------------------------------------

    def take_gradient(self, received: ReceivedMessage, message: Bulk) -> None:
        """Take a part of a stage's weight gradient.

        Raises:
            FrameError: This upkeep sends none; or it is not from the holder, not of this step, or came before.
        """
        context, roles = self._context, self._roles
        shadow = self._shadows.get(message.stage)
        awaited = context.plan.guard.sends_gradient and message.purpose == "gradient"
        from_holder = received.sender in (roles.assignment.holders.get(message.stage), OWNER)
        if shadow is None or not awaited or not from_holder or message.step != roles.step:
            raise FrameError(
                f"{context.name}: {received.sender!r} sent {message.purpose} of stage {message.stage}, step "
                f"{message.step}; expected gradients of {sorted(self._shadows)} at step {roles.step}"
            )
        self.apply_to_shadow(shadow)
        if shadow.gradients is not None or not may_continue(shadow.source, received.sender, message.offset):
            raise FrameError(
                f"{context.name}: the gradient of stage {message.stage} arrived twice, or from two parties"
            )
        with context.timer.time_phase("shadow_receive"):
            if message.offset == 0:
                # the owner hands on what the holder did not send, from its beginning
                shadow.restart_transfer(received.sender)
            shadow.gradients = shadow.expect_gradient().add_part(message.offset, message.total, received.payload)
            # only now: a part that does not fit is none, and would spoil what the others prove
            if received.header is not None:
                shadow.parts.append(received.header)
        if shadow.gradients is not None:
            self._report_held(shadow, shadow.gradients)

    def _report_held(self, shadow: ShadowStage, gradients: dict[str, Tensor]) -> None:
        """Tell the owner that the gradient of a stage is here."""
        # what the owner hands on to itself comes without headers
        came = [part.fields.payload_digest for part in shadow.parts]
        report = GradientHeld(
            epoch=self._roles.epoch,
            step=self._roles.step,
            stage=shadow.stage_index,
            norm_squared=finite_norm_squared(gradients, self._context.plan.numerics),
            gradient=digest_of_parts(came) if came else transfer_digest(gradients),
            parts=tuple(to_signed(part) for part in shadow.parts),
        )
        self._context.post(OWNER, report, ())

    def apply_to_shadow(self, shadow: ShadowStage) -> bool:
        """Let a shadow's own optimizer take the step that was decided; the state before it is kept.

        Returns:
            Whether it did: without the decision or the gradient, or with audits of that step still to do, it stays.
        """
        gradients, clip = shadow.gradients, shadow.pending_apply
        # where verdicts lag, the owner's order can come after its decision
        waits = shadow.order == "awaited" and self._guard.commit_lag > 0
        busy = waits or self._audits.has_audit(shadow.stage_index, shadow.copy.step_count)
        if gradients is None or clip is None or busy:
            return False
        with self._context.timer.time_phase("shadow_apply"):
            shadow.copy.apply_update(shadow.copy.step_count, gradients, clip)
        shadow.last_gradients, shadow.pending_apply = gradients, None
        shadow.reset_step()
        self._moved = True
        if not self._roles.hosted and self._context.name != OWNER:
            self._roles.step = shadow.copy.step_count
        return True

    def apply_next(self) -> bool:
        """Bring one shadow up to date; False when none can be."""
        return any(self.apply_to_shadow(shadow) for shadow in self._shadows.values())

    def is_behind(self, message: Bulk) -> bool:
        """Whether a gradient is of a step that the shadow has not reached: audits of the one before hold it up."""
        shadow = self._shadows.get(message.stage)
        if shadow is not None:
            self.apply_to_shadow(shadow)
        return shadow is not None and shadow.pending_apply is not None and message.step == shadow.copy.step_count + 1

    def has_moved(self) -> bool:
        """Whether a shadow has taken a step since the last call: early messages may be in time now."""
        moved, self._moved = self._moved, False
        return moved

    # --- audits ---------------------------------------------------------------------------------

    def queue_audit(self, message: Audit) -> None:
        """Queue an audit and fetch what it needs."""
        roles = self._roles
        shadow = self._shadows.get(message.stage)
        # what a shadow has told of a step that lags may have the whole of it recomputed when others are at the next one
        is_ordered = shadow is not None and shadow.order == "awaited" and message.step == shadow.copy.step_count
        if shadow is None or not (message.step == roles.step or is_ordered):
            raise FrameError(
                f"{self._context.name}: asked to audit stage {message.stage} at step {message.step}; "
                f"it shadows {sorted(self._shadows)} at step {roles.step}"
            )
        if is_ordered and not message.urgent:
            shadow.order = "given"
        for key in self._audits.add_audit(message, lambda key: find_sent(roles, message.step, key)):
            self._request_input(roles.assignment.holders[key[0]], message.step, key)

    def is_due(self, step: int) -> bool:
        """Whether an audit of this step can still be under way here."""
        return 0 <= self._roles.step - step <= self._guard.commit_lag

    def take_input(self, received: ReceivedMessage, message: FetchReply) -> None:
        """Take a fetched input, if it is what its sender signed."""
        context, roles = self._context, self._roles
        key, stage = message.key, target_of(message.key)
        if stage not in self._shadows or message.evidence is None:
            raise FrameError(f"{context.name}: {received.sender!r} sent a tensor that was not requested")
        source, holder = roles.assignment.holders.get(key[0]), roles.assignment.holders[stage]
        place, link_of, announced = message.tensor_place, roles.assignment.link_of, None
        with contextlib.suppress(FrameError, SignatureError):
            sent = context.statements.open_statement(message.evidence, Activation, message.epoch, place, link_of)
            announced = sent.payload_digest
        # of a frame the digest was checked when it arrived
        header = received.header
        came = digest_hex(received.payload) if header is None else header.fields.payload_digest
        if announced != came:
            if received.sender != source or source == holder:
                raise FrameError(
                    f"{context.name}: {received.sender!r} sent a tensor that differs from the one announced by "
                    f"{source!r}"
                )
            # a wrong copy from the sender convicts no party; the receiver has the bytes under the same header
            self._request_input(holder, message.step, key)
            return
        tensor = tensor_from(received.payload, BOUNDARY_DTYPE, self._shape)
        self._audits.deliver_input(message.step, key, AuditInput(tensor, message.evidence))

    def audit_next(self, *, urgent: bool) -> bool:
        """Do one audit and report the result; False when none is ready."""
        context = self._context
        for behind in self._shadows.values():
            if self._audits.has_audit(behind.stage_index, behind.copy.step_count + 1):
                self.apply_to_shadow(behind)
        task = self._audits.pop_ready(functools.partial(self._can_audit, urgent=urgent), urgent=urgent)
        shadow = None if task is None else self._shadows.get(task.stage)
        if task is None or shadow is None:
            return False
        with context.timer.time_phase("audit"):
            doubt = self._recompute_audit(shadow, task)
        report = AuditReport(
            epoch=self._roles.epoch,
            step=task.step,
            stage=task.stage,
            microbatch=task.microbatch,
            inputs=task.input_headers(),
            digests={
                d: digest_hex(tensor_buffers(shadow.claims[(task.step, d, task.microbatch)])) for d in task.directions
            },
            order=task.order,
            doubt=doubt,
        )
        if doubt is not None:
            shadow.order = "awaited"
        context.post(OWNER, report, ())
        if shadow.recomputed == context.plan.microbatches:
            self._report_recomputed(shadow, task.order)
        return True

    def _can_audit(self, stage: int, step: int, *, urgent: bool) -> bool:
        shadow = self._shadows.get(stage)
        screens = not urgent and self._guard.screens_gradients
        if screens and shadow is not None and shadow.gradients is None:
            # the owner asks when the stage has committed, and its gradient may come over another link
            return False
        # a copy that is past the step is a fault, and says so when it is asked to audit
        return shadow is not None and shadow.copy.step_count >= step

    def _report_recomputed(self, shadow: ShadowStage, order: int) -> None:
        """Every microbatch was followed: say what weight gradient that gives; in lockstep it is the shadow's own."""
        shadow.recomputed = 0
        key = self._roles.noise_keys.get(shadow.stage_index)
        with self._context.timer.time_phase("audit"):
            gradients = shadow.copy.weight_gradient(shadow.copy.step_count, key)
            digest = transfer_digest(gradients)
        if self._guard.classes == "mixed":
            shadow.audited = gradients
        place = {"epoch": self._roles.epoch, "step": shadow.copy.step_count, "stage": shadow.stage_index}
        fields = {
            **place,
            "norm_squared": finite_norm_squared(gradients, self._context.plan.numerics),
            "gradient": digest,
        }
        if self._guard.shadow_upkeep.in_lockstep:
            shadow.gradients = gradients
            self._context.post(OWNER, GradientHeld.model_validate({**fields, "parts": ()}), ())
            return
        self._context.post(OWNER, StepAudited.model_validate({**fields, "order": order}), ())

    def _recompute_audit(self, shadow: ShadowStage, task: AuditTask) -> Doubt | None:
        """Do an audit; with the last one of a step's drawn ones, say why the step's weight gradient looks odd."""
        x, gradient = task.input_tensor("forward"), task.input_tensor("backward")
        if x is None:
            return None
        step, guard = task.step, self._guard
        if gradient is not None and (task.weights or (guard.shadow_upkeep.in_lockstep and not task.urgent)):
            shadow.follow_microbatch(step, task.microbatch, x, gradient)
        elif gradient is not None and guard.screens_gradients and not task.urgent and shadow.order == "none":
            shadow.audit_and_screen(step, task.microbatch, x, gradient)
            return None if self._audits.has_drawn_audit(task.stage, step) else shadow.doubt
        else:
            shadow.audit_microbatch(step, task.microbatch, x, gradient)
        return None

    def _request_input(self, target: str, step: int, key: MessageKey) -> None:
        roles = self._roles
        self._context.post(target, Fetch.from_key(roles.epoch, step, key), ())
