"""The owner's ear: everything that arrives goes to who waits for it, and between two looks the owner works."""

from dataclasses import dataclass

from phalanx.config import printable
from phalanx.errors import CutLogError, PhalanxError
from phalanx.pipeline.assignment.budget import Sample
from phalanx.pipeline.membership.incarnations import Incarnations
from phalanx.pipeline.membership.late_join import LateJoins
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.owner.failover import Failover
from phalanx.pipeline.owner.journal_notes import JournalNotes
from phalanx.pipeline.protocol.greetings import Hello, Leave, Measured, Prepared
from phalanx.pipeline.protocol.log_memory import Observe
from phalanx.pipeline.protocol.mailbox import Mailbox
from phalanx.pipeline.protocol.patience import Patience
from phalanx.pipeline.protocol.received import Received
from phalanx.pipeline.protocol.requests import Requests
from phalanx.pipeline.worker.party import Party
from phalanx.telemetry import PhaseTimer
from phalanx.transport import LinkFault

_SHORT_WAIT_S = 0.05


@dataclass(frozen=True)
class Dispatcher:
    """Where messages to the owner go.

    Attributes:
        mail: Where they come from.
        courier: Takes answers to the owner's own requests.
        newcomers: Hears who wants to join.
        lives: Hears whose process has begun anew.
        succession: Hears who is gone or wants to leave.
        coordinator: Takes what parties commit to and report.
        party: The owner as a party, for everything else.
        silence: Told whenever something has happened.
        noting: Looks for verified states while nothing happens.
        observe: Told what is refused.
        sample: Which of many refusals it is told of.
        timer: Measures the waiting.
    """

    mail: Mailbox
    courier: Requests
    newcomers: LateJoins
    lives: Incarnations
    succession: Failover
    coordinator: Coordinator
    party: Party
    silence: Patience
    noting: JournalNotes
    observe: Observe
    sample: Sample
    timer: PhaseTimer

    def pump(self) -> None:
        """Handle everything that has arrived, then do one piece of work; wait a little if there was neither."""
        handled, before = False, self._progress()
        self._end_earlier_lives()
        for item in self.mail.drain():
            handled = True
            if isinstance(item, LinkFault):
                self.succession.suspect(item.peer, str(item.error))
                continue
            try:
                self._hand_on(item)
            except CutLogError:
                # the owner's own signature says so, not the party that shows it
                raise
            except PhalanxError as exc:
                self._refuse(item, exc)
        worked = self.party.work()
        if worked or self._progress() != before:
            self.silence.heard()
        if worked or handled or self.mail.pending:
            return
        self.noting.look()
        with self.timer.phase("wait"):
            arrived = self.mail.wait(_SHORT_WAIT_S)
        if not arrived:
            self.coordinator.look_again()
            self.succession.suspect_the_dead()

    def _refuse(self, item: Received, error: PhalanxError) -> None:
        if self.courier.was_asked(item):
            # an answer that comes after it was given up is nobody's fault
            return
        self.mail.refused(item)
        number = self.sample.number("refused", item.sender)
        if number is not None:
            body = {"party": item.sender, "error": type(error).__name__, "reason": printable(str(error))}
            self.observe("refused", body | {"number": number})

    def _end_earlier_lives(self) -> None:
        for name in self.lives.take_begun_anew():
            if name in self.succession.alive:
                self.succession.suspect(name, "its process has begun anew")
            else:
                self.newcomers.drop(name)

    def _hand_on(self, item: Received) -> None:
        succession = self.succession
        if self.courier.accepts(item):
            self.silence.heard()
        elif isinstance(item.message, Hello | Measured | Prepared):
            self.newcomers.hear(item, succession.alive)
        elif isinstance(item.message, Leave):
            succession.leaving |= {item.sender} & set(succession.alive)
        elif self.coordinator.handle(item):
            succession.testimony.hear(item)
        else:
            self.party.handle(item)

    def _progress(self) -> tuple[int, ...]:
        """What must change for the step to go on: whoever only talks is as silent as whoever says nothing."""
        return (sum(len(holder.inputs) for holder in self.party.hosted.values()), *self.coordinator.progress)
