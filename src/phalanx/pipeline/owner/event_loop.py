"""The owner's one loop: it alone waits for messages, and hands on what arrives to the part that waits for it."""

import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from phalanx.config import printable_text
from phalanx.errors import CutLogError, FrameError, PhalanxError, TransportError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.membership.late_join import LateJoins
from phalanx.pipeline.owner.context import OwnerContext
from phalanx.pipeline.owner.roster import Roster
from phalanx.pipeline.protocol.greetings import ChallengeReply, Hello, Leave, NotLetIn, PreparedNotice
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import ProgressReport
from phalanx.pipeline.protocol.needs import (
    Delivery,
    LoopTurn,
    MessageNeed,
    Need,
    OwnerTask,
    OwnMail,
    ProgressNeed,
    TensorsDelivery,
    TensorsNeed,
)
from phalanx.pipeline.protocol.tensor_stream import send_bulk
from phalanx.transport import LinkFault

_SHORT_WAIT_S = 0.05
_FAREWELL_S = 0.5
"""How long a process that has been replaced by another one may take to hear of it; most are dead."""

T = TypeVar("T")


@dataclass
class EventLoop:
    """The owner's one loop runs its tasks, and handles messages between them.

    Guarantees:
        No task runs while a message is handled, and no message is handled while a task runs, but where the task awaits
        something. A loop never runs inside itself.

    Attributes:
        newcomers: Handles workers that want to join.
    """

    context: OwnerContext
    roster: Roster
    newcomers: LateJoins
    _is_running: bool = False

    def run_task(self, task: OwnerTask[T]) -> T:
        """Carry a task out, and every other one that it awaits, and see to everything that they need.

        Returns:
            Its result. Its errors are raised, and those of its needs, unless the task that asked catches them.
        """
        if self._is_running:
            task.work.close()
            raise RuntimeError("the owner's loop was called from inside itself")
        self._is_running = True
        waiting: list[Coroutine[Need[Any], Any, Any]] = []
        work: Coroutine[Need[Any], Any, Any] = task.work
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                try:
                    need = work.send(value) if error is None else work.throw(error)
                except StopIteration as done:
                    if not waiting:
                        result: T = done.value
                        return result
                    work, value, error = waiting.pop(), done.value, None
                    continue
                except BaseException as exc:
                    # whatever ends a task is for the one that waits for it to clear up after
                    if not waiting:
                        raise
                    work, value, error = waiting.pop(), None, exc
                    continue
                value, error = None, None
                if isinstance(need, OwnerTask):
                    waiting.append(work)
                    work = need.work
                    continue
                try:
                    value = self.serve_need(need)
                except BaseException as exc:  # noqa: BLE001 - raised where it was waited for
                    error = exc
        finally:
            self._is_running = False

    # --- what tasks need ----------------------------------------------------------------------------

    def serve_need(self, need: Need[Any]) -> object:
        """Serve a need that is no task, and return its result."""
        context = self.context
        match need:
            case LoopTurn():
                self.run_turn()
            case OwnMail():
                self._handle_own_mail()
            case Delivery():
                self._send_delivery(need)
            case TensorsDelivery():
                send_bulk(context.mail.post_message, need.party, need.request, need.tensors, need.step)
            case MessageNeed() | TensorsNeed() | ProgressNeed():
                requests, pending = context.requests, None
                try:
                    pending = requests.begin_request(need)
                    while not (
                        pending.is_answered or pending.party in self.roster.lost or requests.has_lapsed(pending)
                    ):
                        self.run_turn()
                except FrameError:
                    if isinstance(need, TensorsNeed):
                        return None
                    raise
                finally:
                    if pending is not None:
                        requests.end_request(pending)
                if not pending.is_answered and pending.party:
                    context.facts.unanswered.add(pending.party)
                return pending.result_for(need)
            case _:
                raise TypeError(f"the owner's loop knows no {type(need).__name__}")
        return None

    def _send_delivery(self, delivery: Delivery) -> None:
        """Send a message, and record a request that a verdict may rest on."""
        facts, mail = self.context.facts, self.context.mail
        header = mail.post_message(delivery.party, delivery.message, delivery.payload)
        facts.record.add_message(OWNER, delivery.message, header)

    def _handle_own_mail(self) -> None:
        context = self.context
        for item in context.mail.drain_local():
            if not context.coordinator.record_message(item):
                context.party.handle_message(item)

    # --- what arrives -------------------------------------------------------------------------------

    def run_turn(self) -> None:
        """Handle everything that has arrived, then do one piece of work; wait a little if there was neither."""
        context, roster = self.context, self.roster
        mail, party, coordinator = context.mail, context.party, context.coordinator
        handled, before = False, (party.num_inputs, coordinator.progress_counts)
        self._end_earlier_incarnations()
        for item in mail.drain_messages():
            handled = True
            if isinstance(item, LinkFault):
                roster.suspect(item.peer, str(item.error))
                continue
            try:
                if self._take_answer(item):
                    continue
                if isinstance(item.message, Hello | ChallengeReply | PreparedNotice):
                    self.newcomers.receive_message(item, roster.alive)
                elif isinstance(item.message, Leave):
                    roster.leaving.update({item.sender} & set(roster.alive))
                elif coordinator.record_message(item):
                    for outgoing in coordinator.take_outgoing():
                        self._send_delivery(outgoing)
                else:
                    party.handle_message(item)
            except CutLogError:
                # the owner's own signature says so, not the party that shows it
                raise
            except PhalanxError as exc:
                self._refuse_message(item, exc)
        worked = party.do_next_work()
        # a party that only talks is as silent as one that says nothing
        if worked or (party.num_inputs, coordinator.progress_counts) != before:
            context.patience.note_message()
        if not (worked or handled or mail.has_pending):
            self._wait_a_little()

    def _tell_fenced(self, name: str) -> None:
        """Tell a process that another one has its certificate, if it still runs: it takes part no more, and ends."""
        context = self.context
        reason = (
            "another process with this worker's certificate has joined and replaces this one; give each worker a "
            "certificate of its own, and replace this one if you did not start the other process"
        )
        with contextlib.suppress(TransportError):
            context.mail.post_message(name, NotLetIn(epoch=0, reason=reason))
            context.endpoint.flush_frames(_FAREWELL_S)

    def _take_answer(self, item: ReceivedMessage) -> bool:
        requests, patience = self.context.requests, self.context.patience
        if not requests.accept_answer(item):
            return False
        if not isinstance(item.message, ProgressReport):
            # to say what one waits for brings the step no nearer to its end
            patience.note_message()
        return True

    def _wait_a_little(self) -> None:
        context = self.context
        context.notes.note_verified_states()
        with context.timer.time_phase("wait"):
            arrived = context.mail.wait_for_mail(_SHORT_WAIT_S)
        if not arrived:
            context.coordinator.look_again()
            self.roster.suspect_the_dead()

    def _refuse_message(self, item: ReceivedMessage, error: PhalanxError) -> None:
        context, facts = self.context, self.context.facts
        if context.requests.was_asked(item):
            # an answer that comes after it was given up is no party's fault
            return
        context.mail.count_refused(item)
        number = facts.ledger.event_sampler.number_event("refused", item.sender)
        if number is not None:
            body = {"party": item.sender, "error": type(error).__name__, "reason": printable_text(str(error))}
            facts.observe("refused", body | {"number": number})

    def _end_earlier_incarnations(self) -> None:
        incarnations = self.context.incarnations
        for name in incarnations.take_restarted():
            if name in self.roster.alive:
                self._tell_fenced(name)
                self.roster.suspect(name, "its process has restarted")
            else:
                self.newcomers.drop_newcomer(name)
