"""The record of each step: states that are verified, what proves the step, copies for checkpoints, costs."""

from dataclasses import dataclass

from phalanx.pipeline.owner.async_snapshot import Duplicates
from phalanx.pipeline.owner.journal_notes import JournalNotes
from phalanx.pipeline.proof.step_checks import NoteChecks, step_checks
from phalanx.pipeline.protocol.log_memory import LogHeadExchange
from phalanx.pipeline.protocol.running_costs import BytesByLink
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.telemetry import PhaseTimer


@dataclass(frozen=True)
class StepBooks:
    """The keeper of a run's step records; it decides nothing.

    Attributes:
        noting: Told when states are agreed on or may be undone; keeps the records that prove steps.
        duplicates: Told the same; has the copies that are under way.
        witnesses: Tells with each decision how far the audit log has come.
        costs: Bytes of each step, by link.
        timer: Phases of each step.
        note_checks: Told what was checked of each step that is applied.
    """

    noting: JournalNotes
    duplicates: Duplicates
    witnesses: LogHeadExchange
    costs: BytesByLink
    timer: PhaseTimer
    note_checks: NoteChecks | None = None

    def verified(self, facts: StepFacts) -> None:
        """A step may be applied: the states before it are agreed on."""
        step = facts.ledger.step
        self.duplicates.note_agreed(step)
        self.noting.look()
        if self.note_checks is not None:
            self.note_checks(step, step_checks(facts))

    def undone(self, reason: str) -> None:
        """Steps may be undone: copies that are on their way may be of those, and what was noted is noted again."""
        self.duplicates.abandon(reason)
        self.noting.forget()
