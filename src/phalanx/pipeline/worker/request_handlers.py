"""Answers to requests for tensors that this party sent, received, recomputed or holds."""

from collections.abc import Callable, Generator, Mapping
from typing import NamedTuple

from torch import Tensor

from phalanx.errors import FrameError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import (
    Ask,
    Fetch,
    FetchBulk,
    FetchReply,
    MessageKey,
    Place,
    Progress,
    ProgressReport,
    target_of,
)
from phalanx.pipeline.protocol.signed import to_signed
from phalanx.pipeline.protocol.tensor_stream import Post, bulk_messages, send_bulk
from phalanx.pipeline.worker.audit_queue import AuditInput
from phalanx.pipeline.worker.roles import PartyContext, Roles
from phalanx.transport.tensors import tensor_buffers


class _Upload(NamedTuple):
    receiver: str
    about: FetchBulk
    rest: Generator[None]


class StateUploads:
    """The uploads of states that one party still has to make; at most one copy of each stage is kept."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._waiting: dict[int, _Upload] = {}

    def put_state(
        self, receiver: str, about: FetchBulk, state: Callable[[], Mapping[str, Tensor]], num_steps: int
    ) -> None:
        """Copy a state and keep it for sending; an earlier copy of the stage is let go of."""
        self._waiting.pop(about.stage, None)
        if num_steps != about.step:
            raise FrameError(
                f"stage {about.stage}: the state of step {about.step} was requested, but the stage is at {num_steps}"
            )
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in state().items()}
        self._waiting[about.stage] = _Upload(receiver, about, self._send_parts(receiver, about, tensors))

    def send_next(self) -> bool:
        """Send one part of one copy; False when nothing waits."""
        for stage, parcel in self._waiting.items():
            if next(parcel.rest, self) is self:
                del self._waiting[stage]
            return True
        return False

    def drop_uploads(self) -> None:
        """Let go of everything: roles have changed."""
        self._waiting.clear()

    def _send_parts(self, receiver: str, about: FetchBulk, tensors: Mapping[str, Tensor]) -> Generator[None]:
        for message, part in bulk_messages(about, tensors, about.step):
            self._post(receiver, message, part)
            yield


def answer_fetch(context: PartyContext, roles: Roles, sender: str, message: Fetch) -> None:
    """Send the asked-for message or claim of this step, if this party has it.

    Raises:
        FrameError: The sender has no business with it: only the owner and the shadow of the stage that a message
            went to may see it, and only the owner a claim.
    """
    allowed = {OWNER} if message.claim else {OWNER, roles.assignment.shadows.get(target_of(message.key))}
    if sender not in allowed:
        raise FrameError(
            f"{context.name}: {sender!r} asked for a tensor of stage {message.source}; it does not hold that stage"
        )
    tensor = _find_claim(roles, message) if message.claim else _find_message(roles, message)
    if tensor is None and sender != OWNER:
        # an odd message may be audited before all of its inputs are there: they go to the auditor when they are sent
        is_to_come = message.source in roles.hosted and message.step in (roles.step, roles.step + 1)
        if is_to_come and message.microbatch < context.plan.microbatches:
            roles.awaited_tensors[(message.step, message.key)] = sender, message
        return
    header = None if tensor is None else tensor.header
    more = {"claim": message.claim, "evidence": header, "request": message.request}
    answer = FetchReply.about_key(message.epoch, message.step, message.key, more)
    # the owner asks several parties in turn: an empty answer spares it the wait
    context.post(sender, answer, () if tensor is None else (tensor_buffers(tensor.tensor),))


def answer_awaited(context: PartyContext, roles: Roles, step: int, key: MessageKey) -> None:
    """Send a tensor that was just sent to its receiver to an auditor that has asked for it before."""
    awaited = roles.awaited_tensors.pop((step, key), None)
    if awaited is not None:
        answer_fetch(context, roles, *awaited)


def answer_ask(context: PartyContext, roles: Roles, message: Ask) -> None:
    """Tell the owner which tensors of this step every stage here has got and sent."""
    stages = {
        str(index): Progress(
            received=tuple(
                Place(direction=direction, microbatch=m)
                for step, direction, m in sorted(holder.inputs)
                if step == message.step
            ),
            sent=tuple(Place(direction=direction, microbatch=m) for direction, m in sorted(holder.sent)),
        )
        for index, holder in roles.hosted.items()
        if holder.step == message.step
    }
    gradients = tuple(
        index
        for index, shadow in sorted(roles.shadows.items())
        if shadow.gradients is not None and shadow.copy.step_count == message.step
    )
    context.post(OWNER, ProgressReport(epoch=roles.epoch, step=message.step, stages=stages, gradients=gradients), ())


def answer_fetch_bulk(
    context: PartyContext, roles: Roles, uploads: StateUploads, sender: str, message: FetchBulk
) -> None:
    """Send a stage's state, weights, undo copy or gradient to the owner.

    A duplicate is copied now and sent later.

    Raises:
        FrameError: This party has no such thing, or the sender has no business with it.
    """
    if sender != OWNER:
        raise FrameError(f"{context.name}: {sender!r} asked for the {message.purpose} of a stage; only {OWNER!r} may")
    copy = roles.copy_of(message.stage)
    audit = roles.shadows.get(message.stage)
    gradient = _find_gradient(roles, message.stage, message.step)
    if message.purpose == "duplicate":
        uploads.put_state(sender, message, copy.optimizer.state_tensors, copy.step_count)
        return
    lags = context.plan.guard.commit_lag > 0 and message.step == copy.step_count - 1
    num_steps = message.step if message.purpose == "weights" and lags else copy.step_count
    if message.purpose == "state":
        tensors = copy.state_tensors()
    elif message.purpose == "weights":
        tensors = copy.before_update(num_steps)
    elif message.purpose == "snapshot":
        tensors = copy.optimizer.state_tensors()
    elif message.purpose == "gradient" and gradient is not None:
        tensors = gradient
    elif message.purpose == "audited" and audit is not None and audit.audited:
        tensors = audit.audited
    elif message.purpose == "undo":
        tensors = copy.optimizer.undo_state()
    else:
        raise FrameError(f"{context.name}: has no {message.purpose} of stage {message.stage}")
    send_bulk(context.post, sender, message, tensors, num_steps)


def _find_gradient(roles: Roles, stage: int, step: int) -> dict[str, Tensor] | None:
    """The weight gradient of this step, or a shadow's of the last one, as far as this party has it."""
    holder, shadow = roles.hosted.get(stage), roles.shadows.get(stage)
    if shadow is None:
        return None if holder is None else holder.gradients
    return shadow.last_gradients if step < shadow.copy.step_count else shadow.gradients or {}


def find_sent(roles: Roles, step: int, key: MessageKey) -> AuditInput | None:
    """A message that a stage of this party sent in this step or a kept one."""
    source, direction, microbatch = key
    holder = roles.hosted.get(source)
    sent = None if holder is None else holder.sent_in(step).get((direction, microbatch))
    if sent is None:
        return None
    return AuditInput(sent.tensor, None if sent.header is None else to_signed(sent.header))


def _find_message(roles: Roles, message: Fetch) -> AuditInput | None:
    """A message of this step or a kept one, from its sender or else from its receiver."""
    sent = find_sent(roles, message.step, message.key)
    if sent is not None:
        return sent
    target = roles.hosted.get(target_of(message.key))
    slot = (message.step, message.direction, message.microbatch)
    if target is None or slot not in target.inputs or slot not in target.headers:
        return None
    return AuditInput(target.inputs[slot], to_signed(target.headers[slot]))


def _find_claim(roles: Roles, message: Fetch) -> AuditInput | None:
    shadow = roles.shadows.get(message.source)
    claims = {} if shadow is None else shadow.claims
    tensor = claims.get((message.step, message.direction, message.microbatch))
    return None if tensor is None else AuditInput(tensor, None)
