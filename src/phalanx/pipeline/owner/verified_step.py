"""One step to its verified end: attempted until nobody speaks against it, applied, done again where it was undone."""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import NonFiniteLossError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.verdict import Verdict
from phalanx.pipeline.owner.async_snapshot import Duplicates
from phalanx.pipeline.owner.attempt import Attempts
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.owner.failover import Failover
from phalanx.pipeline.owner.journal_notes import JournalNotes
from phalanx.pipeline.owner.step_history import PastStep
from phalanx.pipeline.owner.step_outcome import Outcome
from phalanx.pipeline.owner.step_result import StepResult
from phalanx.pipeline.proof.step_checks import NoteChecks, step_checks
from phalanx.pipeline.proof.step_record import StepRecords
from phalanx.pipeline.protocol.log_memory import LogWitnesses
from phalanx.pipeline.protocol.mailbox import Mailbox
from phalanx.pipeline.protocol.messages import Apply
from phalanx.pipeline.protocol.running_costs import BytesByLink, claimed_links
from phalanx.pipeline.verify.facts import Judgement, StepFacts
from phalanx.pipeline.worker.hosted import StepInputs
from phalanx.pipeline.worker.party import Party
from phalanx.telemetry import PhaseTimer


@dataclass
class VerifiedStep:
    """Attempts, recovers, applies.

    Attributes:
        docket: The present step and assignment.
        coordinator: Opens the next step; knows the clip coefficient.
        succession: Decides who goes on after a verdict or a loss.
        attempts: Waits for decisions.
        party: The owner as a party.
        outcome: Whether a step came to numbers.
        duplicates: Told when states move or are agreed on.
        noting: The same.
        records: Told of applied steps.
        mail: Posts the decision.
        costs: Bytes of each step, by link.
        timer: Phases of each step.
        witnesses: Tells with each decision how far the audit log has come.
        note_checks: Told what was checked of each step that is applied.
        steps_redone: Steps that were undone and done again.
    """

    docket: StepFacts
    coordinator: Coordinator
    succession: Failover
    attempts: Attempts
    party: Party
    outcome: Outcome
    duplicates: Duplicates
    noting: JournalNotes
    records: StepRecords
    mail: Mailbox
    costs: BytesByLink
    timer: PhaseTimer
    witnesses: LogWitnesses
    note_checks: NoteChecks | None = None
    steps_redone: int = 0

    def train(self, step: int, inputs: StepInputs) -> tuple[int, int]:
        """Attempt a step until it is verified, and once more where its outcome is not a number.

        The audits then say that no stage in other hands has made it; the owner's own ones are audited by nobody, so
        all is done again before the batch is blamed.

        Returns:
            Attempts and audits.
        """
        attempts, audits = self._attempt(step, inputs)
        if not self.outcome.is_finite(inputs):
            self.docket.observe("step_repeated", {"step": step, "reason": self.outcome.failure(step, inputs)})
            self.begin_again(step)
            more = self._attempt(step, inputs)
            attempts, audits = attempts + more[0], audits + more[1]
        return attempts, audits

    def begin_again(self, step: int) -> None:
        """Everybody forgets what was done of the step."""
        self.duplicates.abandon("a step begins again")
        self.succession.begin_again(step)
        self.redo_until(step)

    def recover(self, judgement: Judgement | None, step: int) -> None:
        """Somebody is guilty or gone: change roles, and do again what that undid."""
        # copies that are on their way may be of steps that are undone, or from who is excluded
        self.duplicates.abandon("roles changed")
        self.noting.forget()
        self.succession.recover(judgement, step)
        self.redo_until(step)

    def redo_until(self, until: int) -> None:
        """Do again what was undone, from the batches that were kept.

        Raises:
            NonFiniteLossError: The loss of one is not a number.
        """
        for step in range(self.docket.ledger.step, until):
            inputs = self.succession.rollback.undone[step]
            attempts, audits = self.train(step, inputs)
            if not self.outcome.is_finite(inputs):
                raise NonFiniteLossError(self.outcome.failure(step, inputs))
            self.apply(step, inputs, (attempts, audits), ())
            del self.succession.rollback.undone[step]
            self.steps_redone += 1

    def apply(self, step: int, inputs: StepInputs, effort: tuple[int, int], verdicts: Sequence[Verdict]) -> StepResult:
        """Let all optimizers take a verified step, and begin the next one.

        Args:
            step: Which one.
            inputs: Its batch.
            effort: Attempts and audits that it took.
            verdicts: Those that fell in it.
        """
        coordinator, docket = self.coordinator, self.docket
        norm, clip = docket.ledger.total_norm(), coordinator.clip()
        self.duplicates.note_agreed(step)
        self.noting.look()
        self.succession.rollback.remember(PastStep(docket.ledger, docket.assignment, inputs))
        if self.note_checks is not None:
            self.note_checks(step, step_checks(docket))
        head = self.witnesses.head()
        apply = Apply(epoch=self.succession.epoch, step=step, clip_coefficient=clip, log_head=head)
        for name in (*self.succession.alive, OWNER):
            self.mail.post(name, apply, ())
        # the workers update meanwhile; what the next decision tells of the log is signed in this time as well
        self.records.applied()
        self.witnesses.head()
        coordinator.open_step(step + 1, self.succession.epoch)
        for item in self.mail.drain_local():
            if not coordinator.handle(item):
                self.party.handle(item)
        self.party.finish_applies()
        attempt, moved = self.succession.finish(step), self.costs.take(coordinator.bytes_sent)
        return StepResult(
            step=step,
            loss=self.outcome.mean_loss(inputs),
            num_targets=inputs.num_targets,
            gradient_norm=norm,
            attempts=effort[0],
            num_audits=effort[1],
            num_alarms=len(verdicts),
            verdicts=tuple(verdicts),
            phases=self.timer.take(),
            bytes_by_link=moved,
            claimed_links=claimed_links(moved),
            restarts=attempt.number,
            skipped=tuple(sorted(attempt.bypassed)),
            batch=inputs.digest(),
        )

    def _attempt(self, step: int, inputs: StepInputs) -> tuple[int, int]:
        """Attempt a step until it is verified; where a recovery went back, the steps before it come first."""
        attempts, audits = 0, 0
        while True:
            attempts += 1
            self.mail.renew_allowances()
            self.party.finish_applies()
            self.party.begin(step, inputs)
            judgement = self.attempts.run(lambda: self.outcome.is_finite(inputs))
            audits += self.docket.ledger.num_audits
            if judgement is None and not self.succession.lost:
                return attempts, audits
            self.recover(judgement, step)
