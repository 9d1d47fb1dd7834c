"""Notes to the journal: which states are verified."""

from phalanx.pipeline.membership.members import NoteVerified
from phalanx.pipeline.proof.step_record import StepRecords
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.worker.party import Party


class JournalNotes:
    """The notes to the journal, made once a step, as soon as the states are known to be verified.

    Args:
        docket: What was agreed on.
        owner: Has the owner's own stages.
        note: The keeper of the journal, if there is one.
        records: What is recorded of a step is so before the state after it is noted.
    """

    def __init__(self, docket: StepFacts, owner: Party, note: NoteVerified | None, records: StepRecords) -> None:
        self._docket = docket
        self.records = records
        self._hosted = owner.hosted
        self._note = note
        self._noted: int | None = None

    def forget(self) -> None:
        """What was told may be undone: tell it again."""
        self.records.forget()
        self._noted = None

    def look(self) -> None:
        """Tell that the states before the present step are what they should be, if that is news."""
        self.records.look()
        docket, step = self._docket, self._docket.ledger.step
        if self._note is None or self._noted == step:
            return
        if any(holder.copy.step != step for holder in self._hosted.values()) or not self._is_known():
            return
        self._noted = step
        mine = {s: holder.copy.digest() for s, holder in self._hosted.items()} if docket.plan.guard.enabled else {}
        self._note(step, docket.assignment.holders, {**mine, **docket.agreed})

    def _is_known(self) -> bool:
        docket = self._docket
        if docket.plan.guard.enabled:
            return docket.agreed.keys() >= set(docket.watched) and docket.lagging is None
        # a party that commits has the state that it began with
        return len(docket.ledger.commits) == len(docket.assignment.shares)
