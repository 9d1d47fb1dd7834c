"""The owner's side of a verified pipeline: one call per optimizer step, whatever happens inside it."""

import contextlib
import time
from collections.abc import Iterator, Mapping

import torch

from phalanx.engine import StepInputs, StepResult, Verdict
from phalanx.errors import FailedBatchError, PeerLostError, TransportError, VerificationError
from phalanx.pipeline.assignment.budget import allowance_of, answer_bytes
from phalanx.pipeline.assignment.rebalance import Balance
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.membership.late_join import LateJoins
from phalanx.pipeline.membership.members import Files, Incarnations, Members, OwnerLinks
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.owner.event_loop import EventLoop
from phalanx.pipeline.owner.failover import Failover
from phalanx.pipeline.owner.step_books import BytesByLink, Duplicate, Duplicates, JournalNotes, StepBooks
from phalanx.pipeline.owner.verified_step import VerifiedStep
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.proof.step_record import StepRecords
from phalanx.pipeline.protocol.mailbox import Mailbox
from phalanx.pipeline.protocol.messages import FetchBulk, Purpose, Shutdown, StateDigest
from phalanx.pipeline.protocol.needs import TensorsNeed, task
from phalanx.pipeline.protocol.requests import Awake, Patience, Requests
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.worker.party import Party, RunningCosts
from phalanx.pipeline.worker.roles import Library
from phalanx.security.crypto import certified_name
from phalanx.security.privacy import NoiseSecret
from phalanx.telemetry import PhaseTimer
from phalanx.transport import Endpoint


class PipelineEngine:
    """The engine drives stages that may lie, die or stall, and answers each batch with one verified step.

    Args:
        endpoint: The owner's end of all links; it has the owner's name and keys.
        members: The parties that have joined.
        files: Files that the run reads and writes.
        clock: Clock of patience and deadlines; its own when left out.

    Attributes:
        incarnations: Knows which parties may come back, and under which names.

    Guarantees:
        With the guard on, the optimizer of no stage steps before every audit of the step has passed
        and every stage's last state has been confirmed by its shadow. With `guard.commit_lag` = 1 the
        shadows' audits of one step may be under way while the next one runs, which is not applied
        before they have passed; nothing that leaves the engine but a `StepResult` is of a step before
        its audits. A step is redone until it is verified; each redo has one party less. The result
        has the bits of an honest run, as long as holder and shadow are of one numeric class.
    """

    def __init__(
        self,
        plan: StepPlan,
        endpoint: Endpoint,
        members: Members,
        files: Files,
        draw: AuditDraw,
        *,
        clock: Awake | None = None,
    ) -> None:
        self.plan = plan
        self.timer = PhaseTimer(cpu_clock=time.thread_time)
        clock = Awake() if clock is None else clock
        self._revoked_parties = members.newly_revoked
        mail = Mailbox(endpoint)
        self.incarnations = members.incarnations or Incarnations(endpoint, members.names, members.returns)
        self._links = OwnerLinks(endpoint, mail, self.incarnations, Patience(30.0, clock))
        endpoint.allowances.each = allowance_of(plan)
        self._party = Party(OWNER, plan, mail.post, mail.statements, self.timer)
        self._party.roles.library, self._party.roles.state_files = files.library, files.states
        self._party.report_usage(RunningCosts(self.timer, endpoint))
        self._facts = StepFacts(plan, mail.statements, files.observe, classes=members.classes)
        self._facts.noise = None if plan.privacy is None else NoiseSecret()
        self._coordinator = Coordinator(self._facts, draw, mail.carried)
        self._failover = Failover(self._facts, self._coordinator, self._links, self._party.roles, members, files)
        self._requests = Requests(mail.post, clock, endpoint.allowances, answer_bytes(plan))
        self._books = self._open_books(members, files)
        self._newcomers = LateJoins(members, plan, mail, endpoint, files.observe, self.incarnations)
        self._balance = Balance([float(s.end_layer - s.first_layer) for s in plan.stages], members.rebalance_every)
        self._verified_step = VerifiedStep(self._facts, self._coordinator, self._failover, self._party, self._books)
        self._loop = EventLoop(
            self._requests, self._newcomers, self._failover, self._coordinator, self._party, self._books
        )

    def _open_books(self, members: Members, files: Files) -> StepBooks:
        endpoint = self._links.endpoint
        records = StepRecords(self._facts, endpoint.run, files.note_step)
        return StepBooks(
            noting=JournalNotes(self._facts, self._party, files.note_verified, records),
            duplicates=Duplicates(self._facts, self._requests, self._party.roles),
            witnesses=members.witnesses,
            costs=BytesByLink(endpoint),
            timer=self.timer,
            note_checks=files.note_checks,
        )

    # --- life ---------------------------------------------------------------------------------------

    def start(self, step: int, known: Mapping[int, StateDigest], *, timeout_s: float, patience_s: float = 30.0) -> None:
        """Give every party its roles and wait until all copies are where they should be.

        Args:
            known: Digest of each stage's state, from the model or the checkpoint.
            timeout_s: Longest time that one step, or this start, may take.
            patience_s: Longest time without a message before the owner looks for the silent party.

        Raises:
            PeerLostError: A worker did not get ready in time.
        """
        failover = self._failover
        failover.timeout_s, failover.known = timeout_s, dict(known)
        self._links.patience.patience_s = self._requests.timeout_s = patience_s
        self._loop.run(failover.begin(step))

    def fall_back(self, library: Library, step: int, known: Mapping[int, StateDigest]) -> None:
        """Begin again from another state, with every party that is left: after a `NoHolderError`, or as a round begins.

        Args:
            library: Stages as a checkpoint, or the round, has them.
            known: Digest of each stage's state in it.

        Raises:
            PeerLostError: A worker did not get ready in time.
            VerificationError: The owner itself has another state than that.
        """
        self._party.roles.forget_copies()
        self._party.roles.library = library
        self._books.undone("the run continues from another state")
        self._loop.run(self._failover.fall_back(step, known))

    def step(self, step: int, inputs: StepInputs) -> StepResult:
        """Run, verify and apply one optimizer step.

        Raises:
            FailedBatchError: With this batch the loss or a gradient is NaN or infinite although every audit agrees,
                the owner's own ones included. Nothing was updated; another batch can be tried at the same step.
            NonFiniteLossError: The same holds of a batch with a step that was undone before.
            PeerLostError: Without a guard, a worker is gone; or a step did not end in time.
            NoHolderError: Every holder of a stage is gone.
        """
        return self._loop.run(self._step(step, inputs))

    @task
    async def _step(self, step: int, inputs: StepInputs) -> StepResult:
        first_verdict, redone = len(self.verdicts), self.steps_redone
        await self._heed_revocations(step)
        await self._regroup(step)
        self._facts.record.forget_before(step)
        if self._facts.ledger.step != step:
            self._coordinator.open_step(step, self._failover.epoch)
        verified_step = self._verified_step
        effort = await verified_step.train(step, inputs)
        if not verified_step.outcome.is_finite(inputs):
            error = FailedBatchError(verified_step.outcome.failure(step, inputs))
            await verified_step.begin_again(step)
            raise error
        return await verified_step.apply(step, inputs, effort, self.verdicts[first_verdict:], redone)

    async def _heed_revocations(self, step: int) -> None:
        """Replace parties that the owner has revoked, between two steps, before they are sent anything of the next."""
        failover = self._failover
        for entry in self._revoked_parties(failover.revoked):
            newcomer = failover.revoke(entry, step)
            if newcomer is not None:
                self._newcomers.drop(newcomer)
        while any(certified_name(name) in failover.revoked for name in failover.lost):
            await self._verified_step.recover(None, step)

    async def _regroup(self, step: int) -> None:
        """Let workers in and out between two steps, and relieve slow or crowded ones; all states are agreed on then."""
        failover = self._failover
        unsound = failover.is_unsound(step, self._balance)
        if not (self._newcomers.prepared or failover.leaving or unsound):
            return
        await self._verified_step.settle()
        newcomers = self._newcomers.admit()
        if newcomers or failover.leaving or unsound:
            self._books.duplicates.abandon("stages move")
            await failover.regroup(newcomers, step, self._balance)
            await self._verified_step.redo_until(step)

    # a caller that asks for weights may have switched gradients off, and audits and redone steps need them
    @torch.enable_grad()
    def settle(self) -> None:
        """Wait until the last step is verified and the states after it are agreed on; undo and redo it if need be.

        Raises:
            PeerLostError: That did not end in time.
            NoHolderError: Every holder of a stage is gone.
        """
        self._loop.run(self._verified_step.settle())

    @torch.enable_grad()
    def collect(self, stage: int, purpose: Purpose) -> StageCopy:
        """Fetch a stage's state or weights, checked against the digest that holder and shadow signed.

        A holder that does not bring them is replaced, where the other copy does not either.

        Raises:
            VerificationError: Without a guard, the bytes are not the stage's.
            PeerLostError: Without a guard, no answer came in time.
            NoHolderError: Every holder of the stage is gone.
        """
        return self._loop.run(self._collect(stage, purpose))

    @task
    async def _collect(self, stage: int, purpose: Purpose) -> StageCopy:
        while True:
            await self._verified_step.settle()
            holder = self._facts.holder(stage)
            if holder == OWNER:
                return self._party.roles.copy_of(stage)
            try:
                return await collect_agreed(self._facts, stage, purpose)
            except (PeerLostError, VerificationError) as exc:
                if not self.plan.guard.enabled:
                    raise
                self._failover.suspect(holder, str(exc))
                await self._verified_step.recover(None, self._facts.ledger.step)

    def copies(self, purpose: Purpose) -> Iterator[StageCopy]:
        """Every stage in order, with its verified state or weights; the owner's own are not copied."""
        for stage in range(len(self.plan.stages)):
            yield self.collect(stage, purpose)

    def begin_duplicate(self) -> Duplicate:
        """Take the state after the last step for a checkpoint; it comes in while further steps run.

        `look_for_duplicate` says whether it is whole by now.
        """
        self._party.finish_applies()
        return self._books.duplicates.begin(self.next_step)

    def look_for_duplicate(self) -> None:
        """Bring the duplicate under way up to date: whole, or given up because a party is gone or silent."""
        self._books.duplicates.look(self._failover.lost)

    def finish_duplicate(self, duplicate: Duplicate) -> None:
        """Wait until a duplicate is whole, or given up.

        Raises:
            PeerLostError: States were not confirmed in time.
        """
        self.settle()
        self._books.duplicates.note_agreed(self.next_step)
        while not (duplicate.is_whole or duplicate.failure):
            self._loop.turn()
            self.look_for_duplicate()

    @property
    def holders(self) -> Mapping[int, str]:
        """The holder of each stage now."""
        return self._facts.assignment.holders

    @property
    def shadows(self) -> Mapping[int, str]:
        """The shadow of each stage now."""
        return self._facts.assignment.shadows

    @property
    def guarantees(self) -> Mapping[int, str]:
        """The guarantee of each stage now; a name in `GUARANTEES`."""
        return self._failover.guarantees.present

    @property
    def next_step(self) -> int:
        """The step that is under way, or comes next: so many are applied."""
        return self._facts.ledger.step

    @property
    def losses(self) -> tuple[float, ...]:
        """Summed losses of the microbatches of the last step, in their order, in nats."""
        return tuple(self._party.hosted[len(self.plan.stages) - 1].losses)

    @property
    def verdicts(self) -> list[Verdict]:
        """All verdicts so far."""
        return self._failover.verdicts.passed

    @property
    def steps_redone(self) -> int:
        """How many steps were undone and done again."""
        return self._verified_step.steps_redone

    @property
    def takeovers(self) -> int:
        """How many stages have changed hands."""
        return self._failover.takeovers

    @property
    def usage(self) -> dict[str, dict[str, float]]:
        """Running costs that each party reported with its last applied step, CPU seconds by phase."""
        return dict(self._coordinator.usage)

    def close(self, reason: str) -> None:
        """Tell every worker that the run is over."""
        head = self._books.witnesses.head()
        shutdown = Shutdown(epoch=max(self._failover.epoch, 0), reason=reason, log_head=head)
        for name in self._failover.alive:
            # a worker that is gone, or ends before it has signed for this, needs no good-bye
            with contextlib.suppress(TransportError):
                self._links.tell([name], shutdown)
        with contextlib.suppress(TransportError):
            self._links.endpoint.flush(2.0)


@task
async def collect_agreed(facts: StepFacts, stage: int, purpose: Purpose) -> StageCopy:
    """Fetch a stage's state or weights from its holder, or from the other copy where the holder does not bring it.

    Raises:
        VerificationError: The bytes are not the agreed state's.
        PeerLostError: No answer came in time.
    """
    parties = (facts.holder(stage), *((facts.shadow(stage),) if stage in facts.assignment.shadows else ()))
    reason: PeerLostError | VerificationError = PeerLostError(
        f"stage {stage}: {facts.holder(stage)} did not send its {purpose} in time"
    )
    for party in parties:
        copy = await _fetch(facts, party, stage, purpose)
        if copy is not None and _is_agreed(facts, copy, purpose):
            return copy
        if copy is not None:
            reason = VerificationError(
                f"stage {stage}: {party} sent a {purpose} that differs from its signature; not used"
            )
            facts.observe("refused", {"party": party, "error": type(reason).__name__, "reason": str(reason)})
    raise reason


async def _fetch(facts: StepFacts, party: str, stage: int, purpose: Purpose) -> StageCopy | None:
    copy = StageCopy.empty(facts.plan, stage)
    request = FetchBulk(epoch=facts.ledger.epoch, step=facts.ledger.step, stage=stage, purpose=purpose)
    tensors = await TensorsNeed(party, request, copy.state() if purpose == "state" else copy.weights())
    if tensors is None:
        return None
    if purpose == "state":
        copy.load(*tensors)
    else:
        copy.load_weights(tensors[0])
    return copy


def _is_agreed(facts: StepFacts, copy: StageCopy, purpose: Purpose) -> bool:
    agreed = facts.agreed.get(copy.spec.index)
    if agreed is None:
        return True
    return copy.digest() == agreed if purpose == "state" else copy.weights_digest() == agreed.weights
