"""One step to its verified end: attempted until no party speaks against it, applied, done again where it was undone."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx.engine import NO_LIMITS, GuardReport, StepInputs, StepResult, Verdict
from phalanx.errors import FailedBatchError, NonFiniteLossError, PeerLostError, SpikeError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.owner.context import OwnerContext
from phalanx.pipeline.owner.failover import Failover
from phalanx.pipeline.owner.rollback import PastStep
from phalanx.pipeline.owner.roster import Roster
from phalanx.pipeline.owner.step_log import BytesByLink, claimed_links
from phalanx.pipeline.proof.step_record import step_checks
from phalanx.pipeline.protocol.message import ReceivedMessage
from phalanx.pipeline.protocol.messages import Apply
from phalanx.pipeline.protocol.needs import LoopTurn, OwnMail, owner_task
from phalanx.pipeline.verify.facts import Judgement
from phalanx.pipeline.verify.wait_tally import LOOKS_PER_STEP, WaitTally


class StepOutcome:
    """The outcome of a step, read from the owner's last stage and the norms that were committed to."""

    def __init__(self, context: OwnerContext) -> None:
        self._facts = context.facts
        self._party = context.party

    def mean_loss(self, inputs: StepInputs) -> float:
        """Mean over the batch's target tokens, in nats; NaN of a batch without any, where a sample is never empty."""
        plan = self._facts.plan
        losses = self._party.hosted[len(plan.stages) - 1].losses
        if not inputs.num_targets and plan.privacy is not None:
            return 0.0
        return sum(losses) / inputs.num_targets if inputs.num_targets else math.nan

    def is_sound(self, inputs: StepInputs) -> bool:
        """Whether the loss and the gradient's norm are numbers, and within the limits of the step."""
        loss, norm = self.mean_loss(inputs), self._facts.ledger.total_norm()
        return inputs.limits.find_fault(self._facts.ledger.step, loss, norm) is None

    def find_fault(self, step: int, inputs: StepInputs) -> FailedBatchError | None:
        """Return why a step that every audit agrees with is not applied; None where it may be."""
        ledger, loss = self._facts.ledger, self.mean_loss(inputs)
        fault = inputs.limits.find_fault(step, loss, ledger.total_norm())
        if fault is None or isinstance(fault, SpikeError):
            return fault
        stages = [str(stage) for stage, square in sorted(ledger.squared_norms().items()) if square is None]
        place = f" (of stages {', '.join(stages)})" if stages else ""
        return FailedBatchError(
            f"step {step}: loss {loss}, gradient norm {ledger.total_norm()}{place}, although every audit "
            "agrees; lower optimizer.lr or set optimizer.clip_norm, then --resume from the last checkpoint"
        )


class Attempts:
    """The attempts at steps: they wait for a decision, and look for the reason where nothing comes."""

    def __init__(self, context: OwnerContext, roster: Roster) -> None:
        self._tally, self._num_looks = WaitTally(), 0
        self._deadline = self._next_look = math.inf
        self._facts, self._coordinator = context.facts, context.coordinator
        self._patience, self._timeout_s = context.patience, context.step_timeout_s
        self._roster = roster

    @owner_task
    async def await_decision(self, is_sound: Callable[[], bool]) -> Judgement | None:
        """Wait until the step may be applied.

        Args:
            is_sound: Whether the loss and the gradient's norm are numbers so far, and no spike. Where they are not,
                audits tell first which party made them; the owner's own audit of every stage is among them.

        Returns:
            The first judgement; None when the step is decided, or a party is lost.

        Raises:
            PeerLostError: It did not end in time, and only the owner's own work is missing.
        """
        self.begin_clock()
        self._patience.begin_attempt()
        while not self._coordinator.is_decided(may_lag=is_sound()) or (
            not is_sound() and self._coordinator.order_owner_audits()
        ):
            judgement = await self.advance_attempt()
            if judgement is not None or self._roster.lost:
                return judgement
        self._patience.end_attempt()
        return None

    async def advance_attempt(self) -> Judgement | None:
        """Handle received messages and draw the conclusions; look for the reason of a silence."""
        await LoopTurn()
        judgement = await self._coordinator.draw_conclusions()
        while judgement is None and self._coordinator.has_news:
            # to look for mail first would be to wait for some
            judgement = await self._coordinator.draw_conclusions()
        if judgement is None and not self._roster.lost:
            await self._break_silence()
        if judgement is None and not self._roster.lost:
            await self._keep_time()
        return judgement

    def begin_clock(self) -> None:
        """Give the step, or the rest of it, the whole time limit of a step."""
        self._tally, self._num_looks = WaitTally(), 0
        self._deadline = self._patience.clock.wall_seconds() + self._timeout_s
        self._plan_look()

    def _plan_look(self) -> None:
        share = 0.5 + self._coordinator.draw_moment(self._num_looks)
        self._num_looks += 1
        self._next_look = self._patience.clock.wall_seconds() + share * self._timeout_s / LOOKS_PER_STEP

    async def _keep_time(self) -> None:
        """Note now and then what a long step waits for; when its time is up, replace the party that owes most.

        Raises:
            PeerLostError: It was the owner; or the run has no guard.
        """
        now, facts = self._patience.clock.wall_seconds(), self._facts
        if facts.plan.guard.is_enabled and now > self._next_look:
            self._tally.add_waits(await self._coordinator.find_waits())
            self._plan_look()
        if now <= self._deadline:
            return
        waiting_for = self._coordinator.describe_missing()
        late = f"did not end within {self._timeout_s:.0f} s; still waiting for {waiting_for}"
        disputed = self._tally.most_awaited_links()
        if disputed:
            is_fresh = await self._coordinator.lead_links(disputed)
            # all that can be handed on is, so that nobody lacks it in what follows
            debtor = await self._coordinator.find_silent()
            if debtor is None and is_fresh:
                self.begin_clock()
                return
        else:
            debtor = self._tally.find_debtor()
        if debtor is not None:
            self._roster.suspect(debtor, f"it was the slowest party of a step that {late}", "late")
            return
        raise PeerLostError(
            f"step {facts.ledger.step} {late}; raise pipeline.step_timeout_s or check the workers' logs"
        )

    async def _break_silence(self) -> None:
        """Look for the reason why nothing has come for longer than is honest, and replace a silent party."""
        if self._patience.is_time_to_probe():
            self._roster.probe()
        facts = self._facts
        if not facts.plan.guard.is_enabled or not self._patience.is_too_long:
            return
        name = await self._coordinator.find_silent()
        self._patience.note_probe()
        if name is not None:
            waiting_for = self._coordinator.describe_missing()
            self._roster.suspect(name, f"silent while the step waited for {waiting_for}", "silent")


class VerifiedStep:
    """A step on its way to the verified end: it is attempted, recovered, applied.

    Attributes:
        outcome: Whether a step came to numbers.
        steps_redone: Steps that were undone and done again.
    """

    def __init__(self, context: OwnerContext, roster: Roster, failover: Failover) -> None:
        self.outcome = StepOutcome(context)
        self.steps_redone = 0
        self._context, self._roster, self._failover = context, roster, failover
        self._facts = context.facts
        self._attempts = Attempts(context, roster)
        self._link_bytes = BytesByLink(context.endpoint)
        self._num_refused = 0

    @owner_task
    async def verify_step(self, step: int, inputs: StepInputs) -> tuple[int, int]:
        """Attempt a step until it is verified, and once more where its outcome is not a number, or a spike.

        The audits then say that no worker's stage has made it; the owner's own stages are not audited, so all is done
        again before the batch is given up.
        """
        await self._keep_state(step)
        attempts, audits = await self._attempt_step(step, inputs)
        fault = self.outcome.find_fault(step, inputs)
        if fault is not None:
            self._facts.observe("step_repeated", {"step": step, "reason": str(fault)})
            await self.begin_again(step)
            more = await self._attempt_step(step, inputs)
            attempts, audits = attempts + more[0], audits + more[1]
        return attempts, audits

    async def _keep_state(self, step: int) -> None:
        """Keep the state before a step when it is due; replace a party that does not bring its signed state."""
        rollback = self._failover.rollback
        while rollback.kept_states.is_due(step):
            await self.settle_step()
            fault = await rollback.keep_state(step)
            if fault is None:
                return
            self._roster.suspect(*fault, "withheld")
            await self.recover_step(None, step)

    @owner_task
    async def begin_again(self, step: int) -> None:
        """Let every party forget its work on the step."""
        self._context.duplicates.abandon_duplicate("a step is repeated")
        await self._failover.begin_again(step)
        await self.redo_until(step)

    @owner_task
    async def recover_step(self, judgement: Judgement | None, step: int) -> None:
        """Change roles because a party is guilty or gone, and redo the steps that this undid."""
        self._context.forget_unverified("roles changed")
        await self._failover.recover_roles(judgement, step)
        await self.redo_until(step)

    @owner_task
    async def redo_until(self, until: int) -> None:
        """Redo undone steps up to but without `until`, from their kept batches and without limits for spikes."""
        for step in range(self._facts.ledger.step, until):
            rollback = self._failover.rollback
            # it was within its limits once, and without a liar its numbers are others
            inputs = replace(rollback.undone_batches[step], limits=NO_LIMITS)
            attempts, audits = await self.verify_step(step, inputs)
            fault = self.outcome.find_fault(step, inputs)
            if fault is not None:
                raise NonFiniteLossError(str(fault))
            await self.apply_step(step, inputs, (attempts, audits), (), self.steps_redone)
            del rollback.undone_batches[step]
            self.steps_redone += 1

    @owner_task
    async def apply_step(
        self,
        step: int,
        inputs: StepInputs,
        effort: tuple[int, int],
        verdicts: Sequence[Verdict],
        redone_before: int,
    ) -> StepResult:
        """Let all optimizers take a verified step, and begin the next one.

        Args:
            effort: Attempts and audits that it took.
            verdicts: Those that fell in it.
            redone_before: `steps_redone` when the step began.
        """
        context, facts, coordinator = self._context, self._facts, self._context.coordinator
        files, party, witnesses = context.files, context.party, context.members.witnesses
        norm, clip = facts.ledger.total_norm(), coordinator.compute_clip()
        context.duplicates.note_agreed(step)
        context.notes.note_verified_states()
        if files.note_checks is not None:
            files.note_checks(step, step_checks(facts))
        self._failover.rollback.remember_step(PastStep(facts.ledger, facts.assignment, inputs))
        apply = Apply(epoch=facts.ledger.epoch, step=step, clip_coefficient=clip, log_head=witnesses.current_head())
        facts.record.add_message(OWNER, apply, context.tell(self._roster.alive, apply))
        # the workers update meanwhile; what the next decision tells of the log is signed in this time as well
        context.notes.records.note_applied()
        witnesses.current_head()
        coordinator.open_step(step + 1)
        # what the owner is to audit of this step reaches it before its update, as it does with all other parties
        await OwnMail()
        party.handle_message(ReceivedMessage(OWNER, apply, memoryview(b""), None))
        party.finish_applies()
        moved = self._link_bytes.take_new_bytes(coordinator.bytes_sent)
        refused_before, self._num_refused = self._num_refused, context.verdicts.num_refused
        return StepResult(
            step=step,
            loss=self.outcome.mean_loss(inputs),
            num_targets=inputs.num_targets,
            gradient_norm=norm,
            phases=context.timer.take_wall(),
            bytes_by_link=moved,
            claimed_links=claimed_links(moved),
            party_phases=coordinator.take_party_phases(),
            batch=inputs.batch_digest(),
            guard=GuardReport(
                attempts=effort[0],
                num_audits=effort[1],
                num_alarms=len(verdicts) + self._num_refused - refused_before,
                verdicts=tuple(verdicts),
                steps_redone=self.steps_redone - redone_before,
            ),
        )

    async def _attempt_step(self, step: int, inputs: StepInputs) -> tuple[int, int]:
        """Attempt a step until it is verified, after steps that a recovery undid; return attempts and all audits."""
        mail, party, facts = self._context.mail, self._context.party, self._facts
        attempts, audits = 0, 0
        while True:
            attempts += 1
            mail.renew_allowances()
            party.finish_applies()
            party.begin_step(step, inputs)
            judgement = await self._attempts.await_decision(lambda: self.outcome.is_sound(inputs))
            audits += facts.ledger.num_audits
            if judgement is None and not self._roster.lost:
                return attempts, audits
            await self.recover_step(judgement, step)

    @owner_task
    async def settle_step(self) -> None:
        """As `PipelineEngine.settle_last_step`."""
        facts, context = self._facts, self._context
        self._attempts.begin_clock()
        while facts.plan.guard.is_enabled:
            is_settled = facts.agreed_states.keys() >= set(facts.watched_stages) and facts.lagging_ledger is None
            # behind the last step no other one weighs what has come since: the fetch of the next stage does, and the
            # last stage is the owner's
            judgement = context.coordinator.weigh_proofs() if is_settled else await self._attempts.advance_attempt()
            if is_settled and judgement is None:
                break
            if judgement is not None or self._roster.lost:
                await self.recover_step(judgement, facts.ledger.step)
                self._attempts.begin_clock()
        context.notes.records.release_complete()
