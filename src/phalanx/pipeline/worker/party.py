"""A party, which every process of a verified pipeline is, owner and worker alike: it serves stages and shadows others.

One inbox, one compute thread. `handle` takes a message and records it; `work` then runs the most
urgent thing that has all it needs. Nothing ever blocks in the middle of a step.
"""

import time

from phalanx.engine import StepInputs
from phalanx.errors import FrameError, PhalanxError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import (
    Activation,
    Apply,
    Ask,
    Assign,
    Audit,
    Bulk,
    Fault,
    Fetch,
    FetchBulk,
    FetchReply,
    NoiseKeys,
    ProgressReport,
    Ready,
    Relay,
    Release,
    StateDigest,
    UpdateReport,
)
from phalanx.pipeline.worker.request_handlers import StateUploads, answer_ask, answer_fetch, answer_fetch_bulk
from phalanx.pipeline.worker.roles import BuildHeldStage, PartyContext, Roles
from phalanx.pipeline.worker.serving import ServedStages
from phalanx.pipeline.worker.shadowing import ShadowedStages
from phalanx.security.crypto import digest_hex
from phalanx.telemetry import BUSY, WALL, PhaseTimer
from phalanx.transport import Endpoint

_ONLY_FROM_OWNER = (Assign, NoiseKeys, Audit, Apply, Release, Relay, Ask)

_MAX_EARLY = 4096
"""Messages of one sender that may wait for an epoch or a step that has not begun here."""


class Party:
    """A party: the stages and shadows of one process, driven by messages."""

    def __init__(self, context: PartyContext, library: BuildHeldStage | None = None) -> None:
        """`library`: the owner's alone."""
        self.name = context.name
        self.roles = roles = Roles(context, library)
        self.hosted = roles.hosted
        self.shadows = roles.shadows
        self._context = context
        self._serving = ServedStages(context, roles)
        self._shadowing = ShadowedStages(context, roles)
        self._uploads = StateUploads(context.post)
        self._early_messages: list[ReceivedMessage] = []
        self._states_due = self._has_begun = False

    @property
    def num_inputs(self) -> int:
        """How many tensors the stages of this party have been given and still keep."""
        return sum(len(holder.inputs) for holder in self.hosted.values())

    # --- messages -------------------------------------------------------------------------------

    def handle_message(self, received: ReceivedMessage) -> None:
        """Record one message.

        Raises:
            FrameError: The message is not for this party, its sender may not send it, or it is malformed.
        """
        message = received.message
        if isinstance(message, _ONLY_FROM_OWNER) and received.sender != OWNER:
            raise FrameError(f"{self.name}: {received.sender!r} sent {message.kind!r}; only {OWNER!r} may")
        if isinstance(message, Assign):
            self._take_roles(message)
        elif message.epoch > self.roles.epoch:
            self._keep_for_later(received)
        elif message.epoch == self.roles.epoch and isinstance(message, NoiseKeys):
            self.roles.take_noise_keys(message, received.payload)
        elif message.epoch == self.roles.epoch and not isinstance(message, ProgressReport):
            # the answer to a probe says no more than that it came over its link
            self._dispatch_message(received)

    def _dispatch_message(self, received: ReceivedMessage) -> None:
        match received.message:
            case Activation() as message:
                self._serving.take_tensor(received, message)
            case Release() as message:
                self._serving.release_tensor(message)
            case Bulk() as message:
                self._take_bulk(received, message)
            case Relay() as message:
                self._take_relay(received, message)
            case Ask() as message:
                answer_ask(self._context, self.roles, message)
            case Audit() as message:
                self._catch_up(message.step)
                if message.step == self.roles.step + 1:
                    self._keep_for_later(received)
                    return
                self._shadowing.queue_audit(message)
            case Fetch() as message:
                answer_fetch(self._context, self.roles, received.sender, message)
            case FetchReply(claim=False) as message if self._shadowing.is_due(message.step):
                self._shadowing.take_input(received, message)
            case FetchBulk() as message:
                self.finish_applies()
                answer_fetch_bulk(self._context, self.roles, self._uploads, received.sender, message)
            case Apply() as message:
                self._mark_applies(message)
            case message:
                raise FrameError(f"{self.name}: {message.kind!r} from {received.sender!r} is not for this party")

    def _take_roles(self, message: Assign) -> None:
        if message.epoch <= self.roles.epoch:
            return
        # what was decided is applied before the roles change, so that every copy is at the same step
        self._shadowing.drop_audits()
        self.finish_applies()
        self._uploads.drop_uploads()
        self._states_due = self._has_begun = False
        self.roles.take_assignment(message)
        self._announce_if_ready()
        self._replay_early()

    def _take_bulk(self, received: ReceivedMessage, message: Bulk) -> None:
        if message.purpose == "state":
            if self.roles.add_state(received.sender, message, received.payload):
                self._announce_if_ready()
            return
        if message.purpose in ("duplicate", "kept"):
            # answers to requests of the owner are taken before they come here
            raise FrameError(f"{self.name}: {received.sender!r} sent a {message.purpose} state that was not expected")
        self._catch_up(message.step)
        if message.step == self.roles.step + 1 or self._shadowing.is_behind(message):
            self._keep_for_later(received)
        elif self._has_begun:
            # a gradient follows from what the owner sends when all are ready, and one before that is none
            self._shadowing.take_gradient(received, message)

    def _keep_for_later(self, received: ReceivedMessage) -> None:
        if sum(item.sender == received.sender for item in self._early_messages) >= _MAX_EARLY:
            raise FrameError(f"{self.name}: {received.sender!r} sent more than {_MAX_EARLY} messages too early")
        self._early_messages.append(received)

    def _take_relay(self, received: ReceivedMessage, message: Relay) -> None:
        """Take a tensor from the owner's hands as if it had come from its signer."""
        link_of = self.roles.assignment.link_of
        sent = self._context.statements.open_statement(
            message.evidence, Activation, message.epoch, message.tensor_place, link_of
        )
        if sent.payload_digest != digest_hex(received.payload):
            raise FrameError(f"{self.name}: a relayed tensor differs from its header")
        sender = sent.header.fields.sender
        self._serving.take_tensor(ReceivedMessage(sender, sent.message, received.payload, sent.header), sent.message)

    def _mark_applies(self, message: Apply) -> None:
        if message.step != self.roles.step:
            return
        for role in self.roles.all_copies():
            role.pending_apply = message.clip_coefficient
        self.roles.forget_given_up()
        self._states_due = True

    def _announce_if_ready(self) -> None:
        if self.roles.loading:
            return
        for stage in self.hosted:
            self.roles.keep_state(stage)
        states = self._state_digests() if self._context.is_guarded else {}
        self._context.post(OWNER, Ready(epoch=self.roles.epoch, states=states), ())
        if self.name != OWNER:
            self.begin_step(self.roles.step)

    def _replay_early(self) -> None:
        early, self._early_messages = self._early_messages, []
        for item in early:
            try:
                self.handle_message(item)
            except PhalanxError as exc:
                # no request waits for the answer any more, and what a peer sent too early must not end this party
                reason = f"{exc}"[:500]
                fault = Fault(
                    epoch=self.roles.epoch, about=item.sender, error=type(exc).__name__, reason=reason, evidence=None
                )
                self._context.post(OWNER, fault, ())

    def _catch_up(self, step: int) -> None:
        if step == self.roles.step + 1:
            self.finish_applies()

    # --- work -----------------------------------------------------------------------------------

    def begin_step(self, step: int, batch: StepInputs | None = None) -> None:
        """Start a step in every stage and shadow of this party; only the owner has a batch."""
        self.roles.step, self._has_begun = step, True
        for holder in self.hosted.values():
            holder.begin_step(step, batch)
        for shadow in self.shadows.values():
            if shadow.pending_apply is None:
                shadow.reset_step()

    def do_next_work(self) -> bool:
        """Do the most urgent thing that can be done; False when there is nothing to do but wait."""
        if self.roles.loading:
            return False
        for holder in self.hosted.values():
            if holder.pending_apply is not None:
                self._serving.apply_to_stage(holder)
                self._replay_early()
                return True
        shadowing = self._shadowing
        worked = (
            shadowing.audit_next(urgent=True)
            or self._serving.run_next_action()
            or shadowing.audit_next(urgent=False)
            or shadowing.apply_next()
            or self._report_states()
        )
        if shadowing.has_moved():
            self._replay_early()
        return worked or self._uploads.send_next()

    def finish_applies(self) -> None:
        """Let every optimizer take the verified step; early messages of the next one are then in time."""
        before = self.roles.step
        for holder in self.hosted.values():
            self._serving.apply_to_stage(holder)
        for shadow in self.shadows.values():
            self._shadowing.apply_to_shadow(shadow)
        if self._shadowing.has_moved() or self.roles.step != before:
            self._replay_early()

    def _report_states(self) -> bool:
        context = self._context
        late = any(shadow.pending_apply is not None for shadow in self.shadows.values())
        if not self._states_due or (late and context.plan.guard.commit_lag):
            return False
        self._states_due = False
        usage, bytes_sent = context.usage()
        applied = UpdateReport(
            epoch=self.roles.epoch,
            step=max((role.copy.step_count for role in self.roles.all_copies()), default=0),
            states=self._state_digests() if context.is_guarded else {},
            usage=usage,
            bytes_sent=bytes_sent,
        )
        context.post(OWNER, applied, ())
        return True

    def _state_digests(self) -> dict[str, StateDigest]:
        """Digests of the copies that two parties have, by stage: the owner's own stages have no shadow."""
        covered = self.roles.assignment.shadows
        with self._context.timer.time_phase("state_digest"):
            return {
                str(role.stage_index): role.copy.compute_digest()
                for role in self.roles.all_copies()
                if role.stage_index in covered
            }


class RunningCosts:
    """CPU seconds by purpose and bytes by receiver, both since the process started.

    The phases of the compute thread, plus ``process`` (every thread), ``other_threads`` (all but this one: the
    transport's) and, cutting across them, ``hashing`` and ``signing`` of frames. `BUSY` is wall time: that in which it
    did not wait. Wall seconds of a phase, with `WALL` behind its name, are those since the last call.
    """

    def __init__(self, timer: PhaseTimer, endpoint: Endpoint, *, has_walls: bool) -> None:
        """`has_walls`: not of the owner, whose phases are in the result of its step."""
        self._timer, self._has_walls = timer, has_walls
        self._endpoint = endpoint
        self._by_phase: dict[str, float] = {}

    def __call__(self) -> tuple[dict[str, float], dict[str, int]]:
        """Totals so far: seconds by purpose, and bytes of frames by the receiver that signed for them."""
        for name, seconds in self._timer.take_cpu().items():
            self._by_phase[name] = self._by_phase.get(name, 0.0) + seconds
        process = time.process_time()
        walls = self._timer.take_wall() if self._has_walls else {}
        totals = {
            **self._by_phase,
            **{f"{name}{WALL}": seconds for name, seconds in walls.items()},
            "process": process,
            "other_threads": process - time.thread_time(),
            "hashing": self._endpoint.seconds_hashing,
            "signing": self._endpoint.seconds_signing,
            BUSY: self._timer.wall_s(without="wait"),
        }
        return totals, dict(self._endpoint.bytes_sent)
