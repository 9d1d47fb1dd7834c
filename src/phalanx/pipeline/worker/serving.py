"""The stages that a party serves: inputs are checked and screened, outputs are kept and committed to."""

from torch import Tensor

from phalanx.errors import FrameError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.plan import BOUNDARY_DTYPE
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import (
    Activation,
    Commit,
    Fault,
    FetchBulk,
    MessageKey,
    Release,
    ScreenHit,
    SentDigest,
    target_of,
)
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.protocol.tensor_stream import send_bulk, transfer_digest
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.tolerance.screen import Screen
from phalanx.pipeline.worker.request_handlers import answer_awaited
from phalanx.pipeline.worker.roles import PartyContext, Roles
from phalanx.pipeline.worker.stages import HostedStage, SentTensor
from phalanx.planner.schedules import Direction
from phalanx.transport.tensors import tensor_buffers, tensor_from


class ServedStages:
    """The served stages of a party, which run as their inputs arrive."""

    def __init__(self, context: PartyContext, roles: Roles) -> None:
        self._context = context
        self._roles = roles
        self._hosted = roles.hosted
        self._shape, self._size_bytes = context.plan.hidden_shape, context.plan.hidden_bytes
        self._screen = Screen() if context.is_guarded and context.plan.guard.screen else None

    # --- in -------------------------------------------------------------------------------------

    def take_tensor(self, received: ReceivedMessage, message: Activation) -> None:
        """Take a tensor between stages, if it is of this step or the next and from an adjacent stage."""
        context, roles = self._context, self._roles
        holder = self._hosted.get(message.target)
        neighbour = message.target - 1 if message.direction == "forward" else message.target + 1
        sender = roles.assignment.holders.get(neighbour)
        not_mine = roles.assignment.holders.get(message.target) != context.name
        if holder is None or not_mine or message.source != neighbour or sender != received.sender:
            raise FrameError(
                f"{context.name}: {received.sender!r} sent {message.direction} from stage {message.source} to stage "
                f"{message.target}; which is not its link"
            )
        slot = (message.step, message.direction, message.microbatch)
        if message.step not in (roles.step, roles.step + 1) or message.microbatch >= context.plan.microbatches:
            raise FrameError(
                f"{context.name}: tensor for {slot}; expected step {roles.step}, "
                f"microbatches 0..{context.plan.microbatches - 1}"
            )
        if slot in holder.inputs:
            raise FrameError(f"{context.name}: tensor for {slot} arrived twice from {received.sender!r}")
        tensor = self._read_tensor(received, message)
        if tensor is None:
            return
        holder.inputs[slot] = tensor
        if received.header is not None:
            holder.headers[slot] = received.header
        if self._screen is not None and received.sender not in (OWNER, context.name):
            self._screen_tensor(self._screen, message, tensor, holder)

    def release_tensor(self, message: Release) -> None:
        """Use a screened tensor after all: an audit has cleared it."""
        target = self._hosted.get(target_of(message.key))
        if target is not None:
            target.withheld.discard((message.step, message.direction, message.microbatch))

    def _read_tensor(self, received: ReceivedMessage, message: Activation) -> Tensor | None:
        """Read the payload in the expected shape; a signed header with another one proves itself wrong."""
        shape, dtype = self._shape, BOUNDARY_DTYPE
        as_expected = message.shape == shape and message.dtype == str(dtype).removeprefix("torch.")
        if as_expected and received.payload.nbytes == self._size_bytes:
            return tensor_from(received.payload, dtype, shape)
        actual = f"{message.dtype}{list(message.shape)} in {received.payload.nbytes} bytes"
        reason = f"message has {actual}, expected {dtype}{list(shape)} in {self._size_bytes}"
        evidence = None if received.header is None else to_signed(received.header)
        fault = Fault(epoch=message.epoch, about=received.sender, error="FrameError", reason=reason, evidence=evidence)
        self._context.post(OWNER, fault, ())
        return None

    def _screen_tensor(self, screen: Screen, message: Activation, tensor: Tensor, holder: HostedStage) -> None:
        with self._context.timer.time_phase("screen"):
            reason = screen.check_message(message.source, message.direction, tensor)
        if reason is None:
            return
        holder.withheld.add((message.step, message.direction, message.microbatch))
        hit = ScreenHit.about_key(message.epoch, message.step, message.key, {"reason": reason})
        self._context.post(OWNER, hit, ())

    # --- out ------------------------------------------------------------------------------------

    def run_next_action(self) -> bool:
        """Run one action of one stage and send its result; False when none has its input."""
        # the last stage first: it feeds the backwards that others wait for
        for stage in sorted(self._hosted, reverse=True):
            holder = self._hosted[stage]
            if holder.is_ready():
                with self._context.timer.time_phase("compute"):
                    action, tensor = holder.run_next()
                if tensor is not None:
                    self._send_result(holder, action.direction, action.microbatch, tensor)
                if holder.is_finished:
                    self._commit_step(holder)
                return True
        return False

    def apply_to_stage(self, holder: HostedStage) -> None:
        """Let a stage's optimizer take the step that was verified; a worker then begins the next one."""
        gradients = holder.gradients
        if holder.pending_apply is None or gradients is None:
            return
        with self._context.timer.time_phase("optimizer"):
            holder.copy.apply_update(holder.step, gradients, holder.pending_apply)
        holder.pending_apply = None
        with self._context.timer.time_phase("journal"):
            self._roles.keep_state(holder.stage_index)
        if self._context.name == OWNER:
            # the owner begins when it has the next batch
            holder.gradients = None
            return
        self._roles.step = holder.step + 1
        holder.begin_step(holder.step + 1)

    def _send_result(self, holder: HostedStage, direction: Direction, microbatch: int, tensor: Tensor) -> None:
        key: MessageKey = (holder.stage_index, direction, microbatch)
        target, tensor = target_of(key), tensor.contiguous()
        form = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": tuple(tensor.shape)}
        message = Activation.about_key(self._roles.epoch, holder.step, key, {"target": target, **form})
        with self._context.timer.time_phase("send"):
            receiver = self._roles.assignment.holders[target]
            header = self._context.post(receiver, message, (tensor_buffers(tensor),))
        holder.sent[(direction, microbatch)] = SentTensor(tensor, header)
        answer_awaited(self._context, self._roles, holder.step, key)

    def _commit_step(self, holder: HostedStage) -> None:
        context = self._context
        key = self._roles.noise_keys.get(holder.stage_index)
        gradients = holder.gradients = holder.copy.weight_gradient(holder.step, key)
        shadows, digest = self._roles.assignment.shadows_of(holder.stage_index), ""
        if context.is_guarded and shadows:
            with context.timer.time_phase("shadow_send"):
                if context.plan.guard.sends_gradient:
                    # that is what keeps the other copies fresh
                    place = {"epoch": self._roles.epoch, "step": holder.step, "stage": holder.stage_index}
                    request = FetchBulk.model_validate({**place, "purpose": "gradient"})
                    for shadow in shadows:
                        digest = send_bulk(context.post, shadow, request, gradients, holder.step)
                else:
                    digest = transfer_digest(gradients)
        with context.timer.time_phase("commit"):
            received = [header for slot, header in sorted(holder.headers.items()) if slot[0] == holder.step]
            commit = Commit(
                epoch=self._roles.epoch,
                step=holder.step,
                stage=holder.stage_index,
                received=tuple(to_signed(header) for header in received) if context.is_guarded else (),
                sent=tuple(
                    SentDigest(direction=direction, microbatch=m, digest=out.header.fields.payload_digest)
                    for (direction, m), out in sorted(holder.sent.items())
                    if out.header is not None and context.is_guarded
                ),
                norm_squared=finite_norm_squared(gradients, context.plan.numerics),
                gradient=digest,
            )
            context.post(OWNER, commit, ())
