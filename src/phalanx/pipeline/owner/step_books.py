"""The record of each step: states that are verified, what proves the step, copies for checkpoints, costs."""

from dataclasses import dataclass

from phalanx.pipeline.membership.members import NoteVerified
from phalanx.pipeline.owner.async_snapshot import Duplicates
from phalanx.pipeline.proof.step_record import NoteChecks, StepRecords, step_checks
from phalanx.pipeline.protocol.log_memory import LogHeadExchange
from phalanx.pipeline.protocol.running_costs import BytesByLink
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.worker.party import Party
from phalanx.telemetry import PhaseTimer


class JournalNotes:
    """The notes to the journal, made once a step, as soon as the states are known to be verified.

    Args:
        facts: What was agreed on.
        owner: Has the owner's own stages.
        note: The keeper of the journal, if there is one.
        records: What is recorded of a step is so before the state after it is noted.
    """

    def __init__(self, facts: StepFacts, owner: Party, note: NoteVerified | None, records: StepRecords) -> None:
        self._facts = facts
        self.records = records
        self._hosted = owner.hosted
        self._note = note
        self._noted: int | None = None

    def forget(self) -> None:
        """Forget what was told, which may be undone, and tell it again."""
        self.records.forget()
        self._noted = None

    def look(self) -> None:
        """Tell that the states before the present step are what they should be, if that is news."""
        self.records.look()
        facts, step = self._facts, self._facts.ledger.step
        if self._note is None or self._noted == step:
            return
        if any(holder.copy.step != step for holder in self._hosted.values()) or not self._is_known():
            return
        self._noted = step
        mine = {s: holder.copy.digest() for s, holder in self._hosted.items()} if facts.plan.guard.enabled else {}
        self._note(step, facts.assignment.holders, {**mine, **facts.agreed})

    def _is_known(self) -> bool:
        facts = self._facts
        if facts.plan.guard.enabled:
            return facts.agreed.keys() >= set(facts.watched) and facts.lagging is None
        # a party that commits has the state that it began with
        return len(facts.ledger.commits) == len(facts.assignment.holders)


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
