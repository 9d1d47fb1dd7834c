"""One step to its verified end: attempted until no party speaks against it, applied, done again where it was undone."""

from collections.abc import Sequence

from phalanx.engine import GuardReport, StepInputs, StepResult, Verdict
from phalanx.errors import NonFiniteLossError, PeerLostError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.owner.attempt import Attempts
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.owner.failover import Failover
from phalanx.pipeline.owner.step_books import StepBooks
from phalanx.pipeline.owner.step_history import PastStep
from phalanx.pipeline.owner.step_outcome import Outcome
from phalanx.pipeline.protocol.messages import Apply
from phalanx.pipeline.protocol.needs import OwnMail, task
from phalanx.pipeline.protocol.received import ReceivedMessage
from phalanx.pipeline.protocol.running_costs import claimed_links
from phalanx.pipeline.verify.facts import Judgement, StepFacts
from phalanx.pipeline.worker.party import Party


class VerifiedStep:
    """A step on its way to the verified end: it is attempted, recovered, applied.

    Attributes:
        facts: The present step and assignment.
        coordinator: Opens the next step; knows the clip coefficient.
        succession: Decides which parties go on after a verdict or a loss.
        party: The owner as a party.
        books: What is written down of each step.
        attempts: Waits for decisions.
        outcome: Whether a step came to numbers.
        steps_redone: Steps that were undone and done again.
    """

    def __init__(
        self, facts: StepFacts, coordinator: Coordinator, succession: Failover, party: Party, books: StepBooks
    ) -> None:
        self.facts = facts
        self.coordinator = coordinator
        self.succession = succession
        self.party = party
        self.books = books
        self.attempts = Attempts(facts, coordinator, succession)
        self.outcome = Outcome(facts, party)
        self.steps_redone = 0

    @task
    async def train(self, step: int, inputs: StepInputs) -> tuple[int, int]:
        """Attempt a step until it is verified, and once more where its outcome is not a number.

        The audits then say that no worker's stage has made it; the owner's own stages are not audited, so all is done
        again before the batch is given up.

        Returns:
            Attempts and audits.
        """
        attempts, audits = await self._attempt(step, inputs)
        if not self.outcome.is_finite(inputs):
            self.facts.observe("step_repeated", {"step": step, "reason": self.outcome.failure(step, inputs)})
            await self.begin_again(step)
            more = await self._attempt(step, inputs)
            attempts, audits = attempts + more[0], audits + more[1]
        return attempts, audits

    @task
    async def begin_again(self, step: int) -> None:
        """Let every party forget what was done of the step."""
        self.books.duplicates.abandon("a step begins again")
        await self.succession.begin_again(step)
        await self.redo_until(step)

    @task
    async def recover(self, judgement: Judgement | None, step: int) -> None:
        """Change roles because a party is guilty or gone, and do again what that undid."""
        self.books.undone("roles changed")
        await self.succession.recover(judgement, step)
        await self.redo_until(step)

    @task
    async def redo_until(self, until: int) -> None:
        """Do again what was undone, from the batches that were kept.

        Raises:
            NonFiniteLossError: The loss of one is not a number.
        """
        for step in range(self.facts.ledger.step, until):
            inputs = self.succession.rollback.undone[step]
            attempts, audits = await self.train(step, inputs)
            if not self.outcome.is_finite(inputs):
                raise NonFiniteLossError(self.outcome.failure(step, inputs))
            await self.apply(step, inputs, (attempts, audits), (), self.steps_redone)
            del self.succession.rollback.undone[step]
            self.steps_redone += 1

    @task
    async def apply(
        self,
        step: int,
        inputs: StepInputs,
        effort: tuple[int, int],
        verdicts: Sequence[Verdict],
        redone_before: int,
    ) -> StepResult:
        """Let all optimizers take a verified step, and begin the next one.

        Args:
            step: Which one.
            inputs: Its batch.
            effort: Attempts and audits that it took.
            verdicts: Those that fell in it.
            redone_before: What `steps_redone` was when the step began.
        """
        coordinator, facts, books = self.coordinator, self.facts, self.books
        norm, clip = facts.ledger.total_norm(), coordinator.clip()
        books.verified(facts)
        self.succession.rollback.remember(PastStep(facts.ledger, facts.assignment, inputs))
        head = books.witnesses.head()
        apply = Apply(epoch=self.succession.epoch, step=step, clip_coefficient=clip, log_head=head)
        self.succession.links.tell(self.succession.alive, apply)
        # the workers update meanwhile; what the next decision tells of the log is signed in this time as well
        books.noting.records.applied()
        books.witnesses.head()
        coordinator.open_step(step + 1, self.succession.epoch)
        # what the owner is to audit of this step reaches it before its update, as it does with all other parties
        await OwnMail()
        self.party.handle(ReceivedMessage(OWNER, apply, memoryview(b""), None))
        self.party.finish_applies()
        attempt, moved = await self.succession.finish(step), books.costs.take(coordinator.bytes_sent)
        return StepResult(
            step=step,
            loss=self.outcome.mean_loss(inputs),
            num_targets=inputs.num_targets,
            gradient_norm=norm,
            phases=books.timer.take(),
            bytes_by_link=moved,
            claimed_links=claimed_links(moved),
            batch=inputs.digest(),
            guard=GuardReport(
                attempts=effort[0],
                num_audits=effort[1],
                num_alarms=len(verdicts),
                verdicts=tuple(verdicts),
                restarts=attempt.number,
                skipped=tuple(sorted(attempt.bypassed)),
                steps_redone=self.steps_redone - redone_before,
            ),
        )

    async def _attempt(self, step: int, inputs: StepInputs) -> tuple[int, int]:
        """Attempt a step until it is verified; where a recovery went back, the steps before it come first."""
        attempts, audits = 0, 0
        while True:
            attempts += 1
            self.succession.links.mail.renew_allowances()
            self.party.finish_applies()
            self.party.begin(step, inputs)
            judgement = await self.attempts.run(lambda: self.outcome.is_finite(inputs))
            audits += self.facts.ledger.num_audits
            if judgement is None and not self.succession.lost:
                return attempts, audits
            await self.recover(judgement, step)

    @task
    async def settle(self) -> None:
        """Wait until the last step is verified and the states after it are agreed on; undo and redo it if need be.

        Raises:
            PeerLostError: That did not end in time.
            NoHolderError: Every holder of a stage is gone.
        """
        facts, clock = self.facts, self.attempts.silence.clock
        deadline = clock.wall() + self.succession.timeout_s
        while facts.plan.guard.enabled and (set(facts.watched) - facts.agreed.keys() or facts.lagging is not None):
            judgement = await self.attempts.go_on()
            if judgement is not None or self.succession.lost:
                await self.recover(judgement, facts.ledger.step)
            if clock.wall() > deadline:
                waiting_for = self.coordinator.waiting_for()
                raise PeerLostError(f"the last step was not verified in time; waiting for {waiting_for}")
        self.books.noting.records.look()
