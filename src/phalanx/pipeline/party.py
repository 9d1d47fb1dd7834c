"""What every process of a verified pipeline does, owner and worker alike: serve stages, shadow others.

One inbox, one compute thread. `handle` takes a message and records it; `work` then runs the most
urgent thing that has all it needs. Nothing ever blocks in the middle of a step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.errors import FrameError
from phalanx.optimizers import gradient_norm_squared
from phalanx.pipeline.auditing import AuditInput, AuditQueue, AuditTask, InputKey
from phalanx.pipeline.bulk import Post, digest_of_parts, send_bulk, transfer_digest
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.hosted import HostedStage, Outgoing, StepInputs
from phalanx.pipeline.messages import (
    Activation,
    Applied,
    Apply,
    Assign,
    Audit,
    AuditReport,
    Bulk,
    Commit,
    Fault,
    Fetch,
    FetchBulk,
    Fetched,
    GradientHeld,
    Message,
    Ready,
    Release,
    ScreenHit,
    Sent,
    Signed,
    StateDigest,
)
from phalanx.pipeline.plan import BOUNDARY_DTYPE, StepPlan
from phalanx.pipeline.roles import Roles
from phalanx.pipeline.schedules.action import Direction
from phalanx.pipeline.screen import Screen
from phalanx.pipeline.shadow import ShadowStage
from phalanx.pipeline.signed import open_signed, to_signed
from phalanx.pipeline.stage_copy import WrapRunner
from phalanx.security.crypto import Peer, digest_hex
from phalanx.telemetry import PhaseTimer
from phalanx.transport import SignedHeader
from phalanx.transport.tensors import tensor_buffers, tensor_from

Usage = Callable[[], tuple[dict[str, float], dict[str, int]]]


@dataclass(frozen=True)
class Received:
    """A message and the frame that carried it; `header` is None for what a party says to itself."""

    sender: str
    message: Message
    payload: memoryview
    header: SignedHeader | None


class Party:
    """Stages and shadows of one process, driven by messages.

    Args:
        name: This party's name.
        plan: The run.
        post: Sends a message; a message to oneself is delivered to oneself.
        peer: Public key of a party, for headers that others pass on.
        timer: Where CPU and wall time of each phase are added up.
        wrap_runner: How a drill puts an attacker in the place of an honest stage.
    """

    def __init__(
        self,
        name: str,
        plan: StepPlan,
        post: Post,
        peer: Callable[[str], Peer],
        timer: PhaseTimer,
        wrap_runner: WrapRunner = lambda runner: runner,
    ) -> None:
        self.name = name
        self.plan = plan
        self.roles = Roles(name, plan, post, wrap_runner)
        self.hosted = self.roles.hosted
        self.shadows = self.roles.shadows
        self._post = post
        self._peer = peer
        self._timer = timer
        self._guarded = plan.guard.enabled
        self._screen = Screen() if plan.guard.enabled and plan.guard.screen else None
        self._audits = AuditQueue()
        self._early: list[Received] = []
        self._undigested: set[int] = set()
        self._usage: Usage = lambda: ({}, {})
        self._handlers: dict[type[Message], Callable[[Received], None]] = {
            Assign: self._on_assign,
            Activation: self._on_activation,
            Bulk: self._on_bulk,
            Audit: self._on_audit,
            Fetch: self._on_fetch,
            Fetched: self._on_fetched,
            FetchBulk: self._on_fetch_bulk,
            Apply: self._on_apply,
            Release: self._on_release,
        }

    def report_usage(self, usage: Usage) -> None:
        """Tell the party where its running costs are read when it reports an applied step."""
        self._usage = usage

    # --- messages -------------------------------------------------------------------------------

    def handle(self, received: Received) -> None:
        """Record one message.

        Raises:
            FrameError: The message is not for this party, not from who may send it, or malformed.
        """
        message = received.message
        handler = self._handlers.get(type(message))
        if handler is None:
            raise FrameError(f"{self.name}: a {message.kind!r} message from {received.sender!r} is not for this party")
        if isinstance(message, Assign | Audit | FetchBulk | Apply | Release) and received.sender != OWNER:
            raise FrameError(f"{self.name}: {received.sender!r} sent {message.kind!r}; only {OWNER!r} may")
        if message.epoch < self.roles.epoch:
            return
        if message.epoch > self.roles.epoch and not isinstance(message, Assign):
            self._early.append(received)
            return
        handler(received)

    def _on_assign(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, Assign) or message.epoch <= self.roles.epoch:
            return
        # what was verified is applied before the roles change, so that every copy is at the same step
        for holder in self.hosted.values():
            self._apply_hosted(holder)
        for shadow in self.shadows.values():
            self._apply_shadow(shadow)
        self._audits.clear()
        self._undigested.clear()
        self.roles.take(message)
        self._announce_if_ready()
        self._replay_early()

    def _replay_early(self) -> None:
        early, self._early = self._early, []
        for item in early:
            self.handle(item)

    def _announce_if_ready(self) -> None:
        if self.roles.loading:
            return
        states = self.digests() if self._guarded else {}
        self._post(OWNER, Ready(epoch=self.roles.epoch, states=states), ())
        if self.name != OWNER:
            self.begin(self.roles.step)

    def digests(self) -> dict[str, StateDigest]:
        """Digests of every copy that this party has, by stage."""
        copies = {stage: holder.copy for stage, holder in self.hosted.items()}
        copies |= {stage: shadow.copy for stage, shadow in self.shadows.items()}
        with self._timer.phase("state_digest"):
            return {str(stage): copy.digest() for stage, copy in sorted(copies.items())}

    def begin(self, step: int, batch: StepInputs | None = None) -> None:
        """Start a step in every stage and shadow of this party; only the owner has a batch."""
        self.roles.step = step
        for holder in self.hosted.values():
            holder.begin(step, batch)
        for shadow in self.shadows.values():
            if shadow.pending_apply is None:
                shadow.begin()

    def _on_activation(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, Activation):
            return
        holder = self.hosted.get(message.target)
        step = self.roles.step
        neighbour = message.target - 1 if message.direction == "forward" else message.target + 1
        if holder is None or message.source != neighbour or self.roles.holders.get(neighbour) != received.sender:
            raise FrameError(
                f"{self.name}: {received.sender!r} sent {message.direction} from stage {message.source} to stage "
                f"{message.target}; that is not its link"
            )
        slot = (message.step, message.direction, message.microbatch)
        if message.step not in (step, step + 1) or message.microbatch >= self.plan.microbatches:
            raise FrameError(f"{self.name}: tensor for {slot}; expected step {step}, microbatches 0..{self.plan.microbatches - 1}")
        if slot in holder.inputs:
            raise FrameError(f"{self.name}: tensor for {slot} came twice from {received.sender!r}")
        tensor = self._tensor(received, message, holder)
        if tensor is None:
            return
        holder.inputs[slot] = tensor
        if received.header is not None:
            holder.headers[slot] = received.header
        self._look_at(received, message, tensor, holder)

    def _tensor(self, received: Received, message: Activation, holder: HostedStage) -> Tensor | None:
        """Read the payload as what this party expects; a signed header that says otherwise proves itself wrong."""
        shape, dtype = self.plan.hidden_shape, BOUNDARY_DTYPE
        if message.shape == shape and message.dtype == str(dtype).removeprefix("torch."):
            return tensor_from(received.payload, dtype, shape)
        reason = f"message has {message.dtype}{list(message.shape)}, expected {dtype}{list(shape)}"
        evidence = None if received.header is None else to_signed(received.header)
        fault = Fault(epoch=message.epoch, about=received.sender, error="FrameError", reason=reason, evidence=evidence)
        self._post(OWNER, fault, ())
        return None

    def _look_at(self, received: Received, message: Activation, tensor: Tensor, holder: HostedStage) -> None:
        if self._screen is None or received.sender in (OWNER, self.name):
            return
        with self._timer.phase("screen"):
            reason = self._screen.check(message.source, message.direction, tensor)
        if reason is None:
            return
        holder.withheld.add((message.step, message.direction, message.microbatch))
        hit = ScreenHit(
            epoch=message.epoch,
            step=message.step,
            microbatch=message.microbatch,
            direction=message.direction,
            source=message.source,
            reason=reason,
        )
        self._post(OWNER, hit, ())

    def _on_release(self, received: Received) -> None:
        message = received.message
        if isinstance(message, Release):
            target = message.source + (1 if message.direction == "forward" else -1)
            if target in self.hosted:
                self.hosted[target].withheld.discard((message.step, message.direction, message.microbatch))

    def _on_bulk(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, Bulk):
            return
        if message.purpose == "state":
            if self.roles.add_state(received.sender, message, received.payload):
                self._announce_if_ready()
            return
        if message.step == self.roles.step + 1:
            self.finish_applies()
        if message.step == self.roles.step + 1:
            self._early.append(received)
            return
        shadow = self.shadows.get(message.stage)
        sender_is_holder = self.roles.holders.get(message.stage) == received.sender
        if message.purpose != "gradient" or shadow is None or not sender_is_holder or message.step != self.roles.step:
            raise FrameError(
                f"{self.name}: {received.sender!r} sent {message.purpose} of stage {message.stage}, step {message.step}; "
                f"expected gradients of {sorted(self.shadows)} at step {self.roles.step}"
            )
        self._apply_shadow(shadow)
        if shadow.gradients is not None:
            raise FrameError(f"{self.name}: the gradient of stage {message.stage} came twice")
        with self._timer.phase("shadow_receive"):
            if received.header is not None:
                shadow.parts.append(received.header)
            shadow.gradients = shadow.expect_gradient().add(message.offset, message.total, received.payload)
        if shadow.gradients is not None:
            digests = [part.fields.payload_digest for part in shadow.parts]
            self._report_gradient(shadow, digest_of_parts(digests))

    def _report_gradient(self, shadow: ShadowStage, digest: str) -> None:
        if shadow.gradients is None:
            return
        held = GradientHeld(
            epoch=self.roles.epoch,
            step=self.roles.step,
            stage=shadow.index,
            norm_squared=finite_norm_squared(shadow.gradients),
            gradient=digest,
            parts=tuple(to_signed(part) for part in shadow.parts),
        )
        self._post(OWNER, held, ())

    def _on_audit(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, Audit):
            return
        if message.step == self.roles.step + 1:
            self.finish_applies()
        if message.stage not in self.shadows or message.step != self.roles.step:
            raise FrameError(f"{self.name}: asked to audit stage {message.stage} at step {message.step}; not shadowed here")
        for source, direction, microbatch in self._audits.add(message, self._local_input):
            self._fetch_input(self.roles.holders[source], source, direction, microbatch)

    def _fetch_input(self, target: str, source: int, direction: Direction, microbatch: int) -> None:
        request = Fetch(
            epoch=self.roles.epoch,
            step=self.roles.step,
            microbatch=microbatch,
            direction=direction,
            source=source,
            claim=False,
        )
        self._post(target, request, ())

    def _local_input(self, key: InputKey) -> AuditInput | None:
        source, direction, microbatch = key
        holder = self.hosted.get(source)
        sent = None if holder is None else holder.sent.get((direction, microbatch))
        if sent is None:
            return None
        return AuditInput(sent.tensor, None if sent.header is None else to_signed(sent.header))

    def _on_fetch(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, Fetch) or message.step != self.roles.step:
            return
        found = self._claim(message) if message.claim else self._find(message)
        if found is None:
            return
        answer = Fetched(
            epoch=message.epoch,
            step=message.step,
            microbatch=message.microbatch,
            direction=message.direction,
            source=message.source,
            claim=message.claim,
            evidence=found.header,
        )
        self._post(received.sender, answer, (tensor_buffers(found.tensor),))

    def _claim(self, message: Fetch) -> AuditInput | None:
        shadow = self.shadows.get(message.source)
        tensor = None if shadow is None else shadow.claims.get((message.direction, message.microbatch))
        return None if tensor is None else AuditInput(tensor, None)

    def _find(self, message: Fetch) -> AuditInput | None:
        """A message of this step, from its sender or else from its receiver."""
        found = self._local_input((message.source, message.direction, message.microbatch))
        target = self.hosted.get(message.source + (1 if message.direction == "forward" else -1))
        slot = (message.step, message.direction, message.microbatch)
        if found is None and target is not None and slot in target.inputs and slot in target.headers:
            return AuditInput(target.inputs[slot], to_signed(target.headers[slot]))
        return found

    def _on_fetched(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, Fetched) or message.claim or message.step != self.roles.step:
            return
        stage = message.source + (1 if message.direction == "forward" else -1)
        shadow = self.shadows.get(stage)
        if shadow is None or message.evidence is None:
            raise FrameError(f"{self.name}: {received.sender!r} sent a tensor that nobody asked for")
        header = open_signed(message.evidence, self._peer(self.roles.holders[message.source]))
        expected = (message.step, message.microbatch, message.direction, message.source)
        body = header.fields.body
        signed = tuple(body.get(key) for key in ("step", "microbatch", "direction", "source"))
        if signed != expected or header.fields.payload_digest != digest_hex(received.payload):
            # a wrong copy from the sender blames nobody; the receiver has the bytes under the same header
            self._fetch_input(self.roles.holders[stage], message.source, message.direction, message.microbatch)
            return
        tensor = tensor_from(received.payload, BOUNDARY_DTYPE, self.plan.hidden_shape)
        self._audits.deliver((message.source, message.direction, message.microbatch), AuditInput(tensor, message.evidence))

    def _on_fetch_bulk(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, FetchBulk):
            return
        copy = self.roles.copy_of(message.stage)
        shadow = self.shadows.get(message.stage)
        if message.purpose in ("state", "weights"):
            self.finish_applies()
            tensors = copy.state() if message.purpose == "state" else copy.weights()
        elif message.purpose == "gradient" and shadow is not None:
            tensors = shadow.last_gradients if message.step < copy.step else shadow.gradients or {}
        elif message.purpose == "undo" and shadow is not None:
            tensors = copy.optimizer.undo_state()
        else:
            raise FrameError(f"{self.name}: has no {message.purpose} of stage {message.stage}")
        send_bulk(self._post, received.sender, message, tensors, copy.step)

    def _on_apply(self, received: Received) -> None:
        message = received.message
        if not isinstance(message, Apply) or message.step != self.roles.step:
            return
        for copy in (*self.hosted.values(), *self.shadows.values()):
            copy.pending_apply = message.clip_coefficient
        self._undigested = {*self.hosted, *self.shadows}

    # --- work -----------------------------------------------------------------------------------

    def work(self) -> bool:
        """Do the most urgent thing that can be done; False when there is nothing to do but wait."""
        if self.roles.loading:
            return False
        for holder in self.hosted.values():
            if holder.pending_apply is not None:
                self._apply_hosted(holder)
                return True
        return (
            self._audit_next(urgent=True)
            or self._act()
            or self._audit_next(urgent=False)
            or self._apply_next_shadow()
            or self._digest_states()
        )

    def finish_applies(self) -> None:
        """Let every optimizer take the step that was verified."""
        for holder in self.hosted.values():
            self._apply_hosted(holder)
        for shadow in self.shadows.values():
            self._apply_shadow(shadow)

    def _act(self) -> bool:
        # the last stage first: it feeds the backwards that others wait for
        for stage in sorted(self.hosted, reverse=True):
            holder = self.hosted[stage]
            if holder.ready():
                with self._timer.phase("compute"):
                    action, tensor = holder.run_next()
                if tensor is not None:
                    self._send(holder, action.direction, action.microbatch, tensor)
                if holder.finished:
                    self._commit(holder)
                return True
        return False

    def _send(self, holder: HostedStage, direction: Direction, microbatch: int, tensor: Tensor) -> None:
        target = holder.index + (1 if direction == "forward" else -1)
        receiver = self.roles.holders[target]
        tensor = tensor.contiguous()
        message = Activation(
            epoch=self.roles.epoch,
            step=holder.step,
            microbatch=microbatch,
            direction=direction,
            source=holder.index,
            target=target,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
        )
        with self._timer.phase("send"):
            header = self._post(receiver, message, (tensor_buffers(tensor),))
        holder.sent[(direction, microbatch)] = Outgoing(tensor, header)

    def _commit(self, holder: HostedStage) -> None:
        gradients = holder.runner.gradients()
        holder.gradients = gradients
        shadow, digest = self.roles.shadow_names.get(holder.index), ""
        if self._guarded and shadow is not None:
            with self._timer.phase("shadow_send"):
                digest = self._gradient_digest(holder, shadow, gradients)
        with self._timer.phase("commit"):
            received = [header for slot, header in sorted(holder.headers.items()) if slot[0] == holder.step]
            commit = Commit(
                epoch=self.roles.epoch,
                step=holder.step,
                stage=holder.index,
                received=tuple(to_signed(header) for header in received) if self._guarded else (),
                sent=tuple(
                    Sent(direction=direction, microbatch=m, digest=out.header.fields.payload_digest)
                    for (direction, m), out in sorted(holder.sent.items())
                    if out.header is not None and self._guarded
                ),
                norm_squared=finite_norm_squared(gradients),
                gradient=digest,
            )
            self._post(OWNER, commit, ())

    def _gradient_digest(self, holder: HostedStage, shadow: str, gradients: dict[str, Tensor]) -> str:
        if self.plan.guard.shadow == "lockstep":
            return transfer_digest(gradients)
        message = FetchBulk(epoch=self.roles.epoch, step=holder.step, stage=holder.index, purpose="gradient")
        return send_bulk(self._post, shadow, message, gradients, holder.step)

    def _audit_next(self, *, urgent: bool) -> bool:
        task = self._audits.pop(urgent=urgent)
        if task is None:
            return False
        shadow = self.shadows[task.stage]
        self._apply_shadow(shadow)
        with self._timer.phase("audit"):
            self._recompute(shadow, task)
        report = AuditReport(
            epoch=self.roles.epoch,
            step=self.roles.step,
            stage=task.stage,
            microbatch=task.microbatch,
            inputs=task.headers(),
            digests={d: digest_hex(tensor_buffers(shadow.claims[(d, task.microbatch)])) for d in task.directions},
            urgent=task.urgent,
        )
        self._post(OWNER, report, ())
        if shadow.recomputed == self.plan.microbatches and shadow.gradients is None:
            shadow.gradients = shadow.copy.runner.gradients()
            self._report_gradient(shadow, transfer_digest(shadow.gradients))
        return True

    def _recompute(self, shadow: ShadowStage, task: AuditTask) -> None:
        x, gradient = task.tensor("forward"), task.tensor("backward")
        if x is None:
            return
        if self.plan.guard.shadow == "lockstep" and not task.urgent and gradient is not None:
            shadow.follow(self.roles.step, task.microbatch, x, gradient)
        else:
            shadow.audit(self.roles.step, task.microbatch, x, gradient)

    def _apply_hosted(self, holder: HostedStage) -> None:
        if holder.pending_apply is None or holder.gradients is None:
            return
        with self._timer.phase("optimizer"):
            holder.copy.apply(holder.step, holder.gradients, holder.pending_apply)
        holder.pending_apply = None
        if self.name != OWNER:
            self.roles.step = holder.step + 1
            holder.begin(holder.step + 1)
        else:
            holder.gradients = None

    def _apply_next_shadow(self) -> bool:
        for shadow in self.shadows.values():
            if shadow.pending_apply is not None:
                self._apply_shadow(shadow)
                return True
        return False

    def _apply_shadow(self, shadow: ShadowStage) -> None:
        if shadow.pending_apply is None or shadow.gradients is None:
            return
        with self._timer.phase("shadow_apply"):
            shadow.copy.optimizer.snapshot()
            shadow.copy.apply(shadow.copy.step, shadow.gradients, shadow.pending_apply)
        shadow.last_gradients, shadow.pending_apply = shadow.gradients, None
        shadow.begin()
        if not self.hosted and self.name != OWNER:
            self.roles.step = shadow.copy.step
            self._replay_early()

    def _digest_states(self) -> bool:
        if not self._undigested:
            return False
        self._undigested.clear()
        usage, bytes_sent = self._usage()
        applied = Applied(
            epoch=self.roles.epoch,
            step=max((role.copy.step for role in (*self.hosted.values(), *self.shadows.values())), default=0),
            states=self.digests() if self._guarded else {},
            usage=usage,
            bytes_sent=bytes_sent,
        )
        self._post(OWNER, applied, ())
        return True


def finite_norm_squared(gradients: Mapping[str, Tensor]) -> float | None:
    """Squared norm of all gradients together, None when it is not finite."""
    value = gradient_norm_squared(dict(gradients))
    return value if value < float("inf") else None
