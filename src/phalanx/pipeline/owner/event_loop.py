"""The owner's one loop: it alone waits for messages, and hands on what arrives to the part that waits for it."""

import contextlib
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from phalanx.config import printable
from phalanx.errors import CutLogError, FrameError, PhalanxError, TransportError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.membership.late_join import LateJoins
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.owner.failover import Failover
from phalanx.pipeline.owner.step_books import StepBooks
from phalanx.pipeline.protocol.greetings import ChallengeReply, Hello, Leave, NotLetIn, PreparedNotice
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import ProgressReport
from phalanx.pipeline.protocol.needs import (
    Delivery,
    MessageNeed,
    Need,
    OwnerTask,
    OwnMail,
    ProgressNeed,
    TensorsDelivery,
    TensorsNeed,
    Turn,
)
from phalanx.pipeline.protocol.requests import Requests
from phalanx.pipeline.protocol.tensor_stream import send_bulk
from phalanx.pipeline.worker.party import Party
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
        requests: Takes answers to the owner's own requests.
        newcomers: Handles workers that want to join.
        failover: Handles lost and leaving parties; has the links.
        coordinator: Takes what parties commit to and report.
        party: The owner as a party, for everything else.
        books: Looks for verified states while nothing happens; measures the waiting.
    """

    requests: Requests
    newcomers: LateJoins
    failover: Failover
    coordinator: Coordinator
    party: Party
    books: StepBooks
    _is_running: bool = False

    def run(self, task: OwnerTask[T]) -> T:
        """Carry a task out, and every other one that it awaits, and see to everything that they need.

        Returns:
            Its result. Its errors are raised, and those of its needs, unless the task that asked catches them.

        Raises:
            RuntimeError: Another task is being carried out: this one was to be awaited there.
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
                    value = self.answer(need)
                except BaseException as exc:  # noqa: BLE001 - raised where it was waited for
                    error = exc
        finally:
            self._is_running = False

    # --- what tasks need ----------------------------------------------------------------------------

    def answer(self, need: Need[Any]) -> object:
        """Serve a need that is no task, and return its result."""
        mail = self.failover.links.mail
        match need:
            case Turn():
                self.turn()
            case OwnMail():
                self._hear_itself()
            case Delivery():
                self._deliver(need)
            case TensorsDelivery():
                send_bulk(mail.post, need.party, need.request, need.tensors, need.step)
            case MessageNeed() | TensorsNeed() | ProgressNeed():
                requests, pending = self.requests, None
                try:
                    pending = requests.begin(need)
                    while not (
                        pending.is_answered or pending.party in self.failover.lost or requests.has_lapsed(pending)
                    ):
                        self.turn()
                except FrameError:
                    if isinstance(need, TensorsNeed):
                        return None
                    raise
                finally:
                    if pending is not None:
                        requests.end(pending)
                if not pending.is_answered and pending.party:
                    self.coordinator.facts.unanswered.add(pending.party)
                return pending.found(need)
            case _:
                raise TypeError(f"the owner's loop knows no {type(need).__name__}")
        return None

    def _deliver(self, delivery: Delivery) -> None:
        """Send a message, and record a request that a verdict may rest on."""
        header = self.failover.links.mail.post(delivery.party, delivery.message, delivery.payload)
        self.coordinator.facts.record.add_message(OWNER, delivery.message, header)

    def _hear_itself(self) -> None:
        for item in self.failover.links.mail.drain_local():
            if not self.coordinator.handle(item):
                self.party.handle(item)

    # --- what arrives -------------------------------------------------------------------------------

    def turn(self) -> None:
        """Handle everything that has arrived, then do one piece of work; wait a little if there was neither."""
        links = self.failover.links
        handled, before = False, (self.party.num_inputs, self.coordinator.progress)
        self._end_earlier_incarnations()
        for item in links.mail.drain():
            handled = True
            if isinstance(item, LinkFault):
                self.failover.suspect(item.peer, str(item.error))
                continue
            try:
                if self._took_answer(item):
                    continue
                if isinstance(item.message, Hello | ChallengeReply | PreparedNotice):
                    self.newcomers.hear(item, self.failover.alive)
                elif isinstance(item.message, Leave):
                    self.failover.leaving |= {item.sender} & set(self.failover.alive)
                elif self.coordinator.handle(item):
                    for outgoing in self.coordinator.take_outgoing():
                        self._deliver(outgoing)
                else:
                    self.party.handle(item)
            except CutLogError:
                # the owner's own signature says so, not the party that shows it
                raise
            except PhalanxError as exc:
                self._refuse(item, exc)
        worked = self.party.work()
        # a party that only talks is as silent as one that says nothing
        if worked or (self.party.num_inputs, self.coordinator.progress) != before:
            links.patience.heard()
        if not (worked or handled or links.mail.pending):
            self._wait_a_little()

    def _tell_fenced(self, name: str) -> None:
        """Tell a process that another one has its certificate, if it still runs: it takes part no more, and ends."""
        links = self.failover.links
        reason = (
            "another process with this worker's certificate has joined and replaces this one; give each worker a "
            "certificate of its own, and replace this one if you did not start the other process"
        )
        with contextlib.suppress(TransportError):
            links.mail.post(name, NotLetIn(epoch=0, reason=reason))
            links.endpoint.flush(_FAREWELL_S)

    def _took_answer(self, item: ReceivedMessage) -> bool:
        if not self.requests.accepts(item):
            return False
        if not isinstance(item.message, ProgressReport):
            # to say what one waits for brings the step no nearer to its end
            self.failover.links.patience.heard()
        return True

    def _wait_a_little(self) -> None:
        self.books.noting.look()
        with self.books.timer.phase("wait"):
            arrived = self.failover.links.mail.wait(_SHORT_WAIT_S)
        if not arrived:
            self.coordinator.look_again()
            self.failover.suspect_the_dead()

    def _refuse(self, item: ReceivedMessage, error: PhalanxError) -> None:
        if self.requests.was_asked(item):
            # an answer that comes after it was given up is no party's fault
            return
        facts = self.coordinator.facts
        self.failover.links.mail.refused(item)
        number = facts.ledger.sample.number("refused", item.sender)
        if number is not None:
            body = {"party": item.sender, "error": type(error).__name__, "reason": printable(str(error))}
            facts.observe("refused", body | {"number": number})

    def _end_earlier_incarnations(self) -> None:
        for name in self.failover.links.incarnations.take_restarted():
            if name in self.failover.alive:
                self._tell_fenced(name)
                self.failover.suspect(name, "its process has restarted")
            else:
                self.newcomers.drop(name)
