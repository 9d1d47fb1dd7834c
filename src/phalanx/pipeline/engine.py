"""The owner's side of a verified pipeline: one call per optimizer step, whatever happens inside it."""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from phalanx.errors import FailedBatchError, NonFiniteLossError, PeerLostError, PhalanxError, TransportError
from phalanx.pipeline.attempt import Attempts
from phalanx.pipeline.balance import Balance
from phalanx.pipeline.chronicle import PastStep
from phalanx.pipeline.collecting import collect_agreed
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.coordinator import Coordinator
from phalanx.pipeline.courier import Courier
from phalanx.pipeline.docket import Docket, Judgement
from phalanx.pipeline.draw import AuditDraw
from phalanx.pipeline.duplicate import Duplicate, Duplicates
from phalanx.pipeline.hosted import StepInputs
from phalanx.pipeline.inbox import Loopback
from phalanx.pipeline.members import Files, Members
from phalanx.pipeline.messages import Apply, Hello, Leave, Prepared, Purpose, Shutdown, StateDigest
from phalanx.pipeline.newcomers import Newcomers
from phalanx.pipeline.noting import Noting
from phalanx.pipeline.party import Party
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.roles import Library
from phalanx.pipeline.running_costs import BytesByLink, RunningCosts
from phalanx.pipeline.silence import Awake, Silence
from phalanx.pipeline.stage_copy import StageCopy
from phalanx.pipeline.step_result import StepResult, describe_failure
from phalanx.pipeline.succession import Office, Succession
from phalanx.pipeline.verdict import Verdict
from phalanx.security.crypto import Peer
from phalanx.telemetry import PhaseTimer
from phalanx.transport import Endpoint, LinkFault


class PipelineEngine:
    """Drives stages that may lie, die or stall, and answers each batch with one verified step.

    Guarantees:
        With the guard on, the optimizer of no stage steps before every audit of the step has passed
        and every stage's last state has been confirmed by its shadow. With `guard.commit_lag` = 1 the
        shadows' audits of one step may be under way while the next one runs, which is not applied
        before they have passed; nothing that leaves the engine but a `StepResult` is of a step before
        its audits. A step is redone until it is verified; each redo has one party less. The result
        has the bits of an honest run, as long as holder and shadow are of one numeric class.

    Raises:
        ConfigError: With this upkeep, copies could not stay equal in these parties' hands.
    """

    def __init__(
        self, plan: StepPlan, owner: Peer, endpoint: Endpoint, members: Members, files: Files, draw: AuditDraw
    ) -> None:
        members.check_upkeep(plan.guard)
        self.plan = plan
        self.timer = PhaseTimer(cpu_clock=time.thread_time)
        self.steps_redone = 0
        self._mail = Loopback(owner, endpoint)
        self._files = files
        self._party = Party(OWNER, plan, self._mail.post, self._mail.peer, self.timer)
        self._party.roles.library, self._party.roles.state_files = files.library, files.states
        self._party.report_usage(RunningCosts(self.timer, endpoint))
        clock = Awake()
        silence = Silence(30.0, clock)
        self._courier = Courier(self._mail.post, self._pump, clock, timeout_s=30.0)
        self._docket = Docket(plan, self._mail.peer, files.observe, classes=members.classes)
        self._newcomers = Newcomers(members, plan, self._mail, endpoint, files.observe)
        self._coordinator = Coordinator(self._docket, self._mail.post, self._courier, draw)
        self._endpoint = endpoint
        office = Office(self._docket, self._coordinator, self._courier, self._mail, endpoint, self._pump, silence)
        self._succession = Succession(office, members, files)
        self._balance = Balance([float(s.end_layer - s.first_layer) for s in plan.stages], members.rebalance_every)
        self._attempts = Attempts(self._docket, self._coordinator, self._succession, self._pump, silence)
        self._courier.is_gone = lambda party: party in self._succession.lost
        self._bytes = BytesByLink(endpoint)
        self._noting = Noting(self._docket, self._party, files.note_verified)
        self._duplicates = Duplicates(self._docket, self._courier, self._party.roles)

    # --- life ---------------------------------------------------------------------------------------

    def start(self, step: int, known: Mapping[int, StateDigest], *, timeout_s: float, patience_s: float = 30.0) -> None:
        """Give every party its roles and wait until all copies are where they should be.

        Args:
            step: The next optimizer step.
            known: Digest of each stage's state, from the model or the checkpoint.
            timeout_s: Longest time that one step, or this start, may take.
            patience_s: Longest time without a message before the owner looks for who is silent.

        Raises:
            PeerLostError: A worker did not get ready in time.
        """
        succession = self._succession
        succession.timeout_s, succession.known = timeout_s, dict(known)
        self._attempts.silence.patience_s = self._courier.timeout_s = patience_s
        succession.begin(step)

    def fall_back(self, library: Library, step: int, known: Mapping[int, StateDigest]) -> None:
        """After a `NoHolderError`: everybody who is left begins again from an older state.

        Args:
            library: Stages as a checkpoint has them.
            step: The checkpoint's next step.
            known: Digest of each stage's state in it.

        Raises:
            PeerLostError: A worker did not get ready in time.
            VerificationError: The owner itself has another state than the checkpoint.
        """
        self._party.roles.library = library
        self._duplicates.abandon("the run went back to a checkpoint")
        self._noting.forget()
        self._succession.fall_back(step, known)

    def step(self, step: int, inputs: StepInputs) -> StepResult:
        """Run, verify and apply one optimizer step.

        Raises:
            FailedBatchError: With this batch the loss or a gradient is NaN or infinite although every audit agrees,
                the owner's own ones included. Nothing was updated; another batch can be tried at the same step.
            NonFiniteLossError: So is that of a batch whose step was undone before.
            PeerLostError: Without a guard, a worker is gone; or a step did not end in time.
            NoHolderError: Every holder of a stage is gone.
        """
        first_verdict, redone = len(self.verdicts), self.steps_redone
        self._regroup(step)
        self._succession.testimony.forget_before(step)
        if self._docket.ledger.step != step:
            self._coordinator.open_step(step, self._succession.epoch)
        attempts, audits = self._train(step, inputs)
        if not self._is_finite(inputs):
            error = FailedBatchError(self._failure(step, inputs))
            self._begin_again(step)
            raise error
        result = self._apply(step, inputs, attempts, audits, self.verdicts[first_verdict:])
        return replace(result, steps_redone=self.steps_redone - redone)

    def _train(self, step: int, inputs: StepInputs) -> tuple[int, int]:
        """Attempt a step until it is verified, and once more where its outcome is not a number.

        The audits then say that no stage in other hands has made it; the owner's own ones are audited by nobody, so
        all is done again before the batch is blamed.

        Returns:
            Attempts and audits.
        """
        attempts, audits = self._attempt(step, inputs)
        if not self._is_finite(inputs):
            self._files.observe("step_repeated", {"step": step, "reason": self._failure(step, inputs)})
            self._begin_again(step)
            more = self._attempt(step, inputs)
            attempts, audits = attempts + more[0], audits + more[1]
        return attempts, audits

    def _begin_again(self, step: int) -> None:
        """Everybody forgets what was done of the step."""
        self._duplicates.abandon("a step begins again")
        self._succession.begin_again(step)
        self._redo_until(step)

    def _attempt(self, step: int, inputs: StepInputs) -> tuple[int, int]:
        """Attempt a step until it is verified; where a recovery went back, the steps before it come first."""
        attempts, audits = 0, 0
        while True:
            attempts += 1
            self._party.finish_applies()
            self._party.begin(step, inputs)
            judgement = self._attempts.run(lambda: self._is_finite(inputs))
            audits += self._docket.ledger.num_audits
            if judgement is None and not self._succession.lost:
                return attempts, audits
            self._recover(judgement, step)

    def _recover(self, judgement: Judgement | None, step: int) -> None:
        # copies that are on their way may be of steps that are undone, or from who is excluded
        self._duplicates.abandon("roles changed")
        self._noting.forget()
        self._succession.recover(judgement, step)
        self._redo_until(step)

    def _redo_until(self, until: int) -> None:
        """Do again what was undone, from the batches that were kept."""
        for step in range(self._docket.ledger.step, until):
            inputs = self._succession.rollback.undone[step]
            attempts, audits = self._train(step, inputs)
            if not self._is_finite(inputs):
                raise NonFiniteLossError(self._failure(step, inputs))
            self._apply(step, inputs, attempts, audits, ())
            del self._succession.rollback.undone[step]
            self.steps_redone += 1

    def _regroup(self, step: int) -> None:
        """Let workers in and out between two steps, and relieve slow ones; what moves must be agreed on before."""
        succession, busy = self._succession, self._coordinator.busy
        lopsided = self._balance.is_lopsided(step, self._docket.assignment, succession.alive, busy)
        if not (self._newcomers.prepared or succession.leaving or lopsided):
            return
        self.settle()
        if self._succession.rollback.is_turning_point(step):
            newcomers = self._newcomers.admit()
            if newcomers or succession.leaving or lopsided:
                self._duplicates.abandon("stages move")
                succession.regroup(newcomers, step, self._balance)
                self._redo_until(step)

    # whoever asks for weights may have switched gradients off, and audits and redone steps need them
    @torch.enable_grad()
    def settle(self) -> None:
        """Wait until the last step is verified and the states after it are agreed on; undo and redo it if need be.

        Raises:
            PeerLostError: That did not end in time.
            NoHolderError: Every holder of a stage is gone.
        """
        deadline = time.monotonic() + self._succession.timeout_s
        coordinator, docket = self._coordinator, self._docket
        while self.plan.guard.enabled and (set(self.shadows) - docket.agreed.keys() or docket.lagging is not None):
            judgement = self._attempts.go_on()
            if judgement is not None or self._succession.lost:
                self._recover(judgement, docket.ledger.step)
            if time.monotonic() > deadline:
                raise PeerLostError(f"the last step was not verified in time; waiting for {coordinator.waiting_for()}")

    def collect(self, stage: int, purpose: Purpose) -> StageCopy:
        """Fetch a stage's state or weights, checked against the digest that holder and shadow signed.

        Raises:
            VerificationError: The bytes are not those of the agreed state.
            PeerLostError: No answer came in time.
        """
        self.settle()
        if self._docket.holder(stage) == OWNER:
            return self._party.roles.copy_of(stage)
        return collect_agreed(self._docket, self._courier, stage, purpose)

    def copies(self, purpose: Purpose) -> Iterator[StageCopy]:
        """Every stage in order, with its verified state or weights; the owner's own are not copied."""
        for stage in range(len(self.plan.stages)):
            yield self.collect(stage, purpose)

    def begin_duplicate(self) -> Duplicate:
        """Take the state after the last step for a checkpoint; it comes in while further steps run.

        `look_for_duplicate` says whether it is whole by now.
        """
        self._party.finish_applies()
        return self._duplicates.begin(self.next_step)

    def look_for_duplicate(self) -> None:
        """Bring the duplicate under way up to date: whole, or given up because somebody is gone or silent."""
        self._duplicates.look()

    def finish_duplicate(self, duplicate: Duplicate) -> None:
        """Wait until a duplicate is whole, or given up.

        Raises:
            PeerLostError: States were not confirmed in time.
        """
        self.settle()
        self._duplicates.note_agreed(self.next_step)
        while not (duplicate.is_whole or duplicate.failure):
            self._pump()
            self._duplicates.look()

    @property
    def holders(self) -> Mapping[int, str]:
        """Who holds each stage now."""
        return self._docket.assignment.holders

    @property
    def shadows(self) -> Mapping[int, str]:
        """Who shadows each stage now."""
        return self._docket.assignment.shadows

    @property
    def next_step(self) -> int:
        """The step that is under way, or comes next: so many are applied."""
        return self._docket.ledger.step

    @property
    def verdicts(self) -> list[Verdict]:
        """All verdicts so far."""
        return self._succession.verdicts

    @property
    def takeovers(self) -> int:
        """How many stages have changed hands."""
        return self._succession.takeovers

    @property
    def usage(self) -> dict[str, dict[str, float]]:
        """Running costs that each party reported with its last applied step, CPU seconds by phase."""
        return dict(self._coordinator.usage)

    def close(self, reason: str) -> None:
        """Tell every worker that the run is over."""
        shutdown = Shutdown(epoch=max(self._succession.epoch, 0), reason=reason)
        for name in self._succession.alive:
            # a worker that is gone, or ends before it has signed for this, needs no good-bye
            with contextlib.suppress(TransportError):
                self._mail.post(name, shutdown, ())
        with contextlib.suppress(TransportError):
            self._endpoint.flush(2.0)

    # --- one attempt ------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Handle everything that has arrived, then do one piece of work; wait a little if there was neither."""
        handled, before = False, self._progress()
        for item in self._mail.drain():
            handled = True
            if isinstance(item, LinkFault):
                self._succession.suspect(item.peer, str(item.error))
                continue
            try:
                if self._courier.accepts(item):
                    self._attempts.silence.heard()
                    continue
                if isinstance(item.message, Hello | Prepared):
                    self._newcomers.hear(item, self._succession.alive)
                elif isinstance(item.message, Leave):
                    self._succession.leaving |= {item.sender} & set(self._succession.alive)
                elif self._coordinator.handle(item):
                    self._succession.testimony.hear(item)
                else:
                    self._party.handle(item)
            except PhalanxError as exc:
                self._files.observe("refused", {"party": item.sender, "error": type(exc).__name__, "reason": str(exc)})
        worked = self._party.work()
        if worked or self._progress() != before:
            self._attempts.silence.heard()
        if worked or handled or self._mail.pending:
            return
        self._noting.look()
        with self.timer.phase("wait"):
            arrived = self._mail.wait(0.05)
        if not arrived:
            self._coordinator.look_again()
            self._succession.suspect_the_dead()

    def _progress(self) -> tuple[int, ...]:
        """What must change for the step to go on: whoever only talks is as silent as whoever says nothing."""
        return (sum(len(holder.inputs) for holder in self._party.hosted.values()), *self._coordinator.progress)

    def _failure(self, step: int, inputs: StepInputs) -> str:
        ledger = self._docket.ledger
        return describe_failure(step, self._mean_loss(inputs), ledger.total_norm(), ledger.norms())

    def _mean_loss(self, inputs: StepInputs) -> float:
        losses = self._party.hosted[len(self.plan.stages) - 1].losses
        return sum(losses) / inputs.num_targets if inputs.num_targets else math.nan

    def _is_finite(self, inputs: StepInputs) -> bool:
        """Whether the loss and the gradient's norm are numbers."""
        return math.isfinite(self._mean_loss(inputs)) and math.isfinite(self._docket.ledger.total_norm())

    def _apply(
        self,
        step: int,
        inputs: StepInputs,
        attempts: int,
        audits: int,
        verdicts: Sequence[Verdict],
    ) -> StepResult:
        coordinator, docket = self._coordinator, self._docket
        norm, clip = docket.ledger.total_norm(), coordinator.clip()
        self._duplicates.note_agreed(step)
        self._noting.look()
        self._succession.rollback.remember(PastStep(docket.ledger, docket.assignment, inputs))
        for name in (*self._succession.alive, OWNER):
            self._mail.post(name, Apply(epoch=self._succession.epoch, step=step, clip_coefficient=clip), ())
        coordinator.open_step(step + 1, self._succession.epoch)
        for item in self._mail.drain_local():
            if not coordinator.handle(item):
                self._party.handle(item)
        self._party.finish_applies()
        attempt = self._succession.finish(step)
        return StepResult(
            step=step,
            loss=self._mean_loss(inputs),
            num_targets=inputs.num_targets,
            gradient_norm=norm,
            attempts=attempts,
            num_audits=audits,
            num_alarms=len(verdicts),
            verdicts=tuple(verdicts),
            phases=self.timer.take(),
            bytes_by_link=self._bytes.take(coordinator.bytes_sent),
            restarts=attempt.number,
            skipped=tuple(sorted(attempt.bypassed)),
            batch=inputs.digest(),
        )
