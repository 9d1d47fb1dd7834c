"""The owner's side of a verified pipeline: one call per optimizer step, whatever happens inside it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from phalanx.engine import StepInputs, StepResult, Verdict
from phalanx.errors import PeerLostError, TransportError, VerificationError
from phalanx.pipeline.assignment.rebalance import PaceMeter
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.membership.late_join import LateJoins
from phalanx.pipeline.membership.members import Files, Incarnations, Members
from phalanx.pipeline.owner.context import OwnerContext, TimeLimits
from phalanx.pipeline.owner.event_loop import EventLoop
from phalanx.pipeline.owner.failover import Failover
from phalanx.pipeline.owner.roster import Roster
from phalanx.pipeline.owner.step_log import Duplicate
from phalanx.pipeline.owner.verified_step import VerifiedStep
from phalanx.pipeline.plan import StepPlan
from phalanx.pipeline.protocol.messages import FetchBulk, Purpose, Shutdown, StateDigest
from phalanx.pipeline.protocol.needs import TensorsNeed, owner_task
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.verify.draw import AuditDraw
from phalanx.pipeline.verify.facts import StepFacts
from phalanx.pipeline.worker.roles import BuildHeldStage
from phalanx.security.crypto import certified_name
from phalanx.transport import Endpoint


class PipelineEngine:
    """The engine drives stages that may lie, die or stall, and answers each batch with one verified step.

    Args:
        endpoint: The owner's end of all links; it has the owner's name and keys.
        members: The parties that have joined.
        files: Files that the run reads and writes.

    Guarantees:
        With the guard on, the optimizer of no stage steps before every audit of the step has passed
        and every stage's last state has been confirmed by its shadow. With `guard.commit_lag` = 1 the
        shadows' audits of one step may be under way while the next one runs, which is not applied
        before they have passed; nothing that leaves the engine but a `StepResult` is of a step before
        its audits. A step is redone until it is verified; each redo has one party less. The result
        has the bits of an honest run, as long as holder and shadow are of one numeric class.
    """

    def __init__(
        self, plan: StepPlan, endpoint: Endpoint, members: Members, files: Files, draw: AuditDraw, limits: TimeLimits
    ) -> None:
        self.plan = plan
        self._context = context = OwnerContext.make_context(plan, endpoint, members, files, draw, limits)
        self._facts = context.facts
        self._roster = roster = Roster(context)
        self._failover = Failover(context, roster)
        self._newcomers = LateJoins(members, plan, context.mail, endpoint, files.observe, context.incarnations)
        self._pace_meter = PaceMeter([float(s.end_layer - s.first_layer) for s in plan.stages], members.rebalance_every)
        self._verified_step = VerifiedStep(context, roster, self._failover)
        self._loop = EventLoop(context, roster, self._newcomers)

    # --- life ---------------------------------------------------------------------------------------

    def start_parties(self, step: int, known: Mapping[int, StateDigest]) -> None:
        """Give every party its roles and wait until all copies are where they should be.

        Args:
            known: Digest of each stage's state, from the model or the checkpoint.

        Raises:
            PeerLostError: A worker did not get ready in time.
        """
        self._loop.run_task(self._failover.assign_first_roles(step, known))

    def fall_back(self, library: BuildHeldStage, step: int, known: Mapping[int, StateDigest]) -> None:
        """Begin again from another state, with every party that is left: after a `NoHolderError`, or as a round begins.

        Args:
            library: Stages as a checkpoint, or the round, has them.
            known: Digest of each stage's state in it.

        Raises:
            PeerLostError: A worker did not get ready in time.
        """
        context = self._context
        context.party.roles.begin_anew(library)
        context.forget_unverified("the run continues from another state")
        self._loop.run_task(self._failover.fall_back(step, known))

    def train_turn(self, step: int, inputs: StepInputs) -> StepResult:
        """Run, verify and apply one optimizer step.

        Raises:
            FailedBatchError: With this batch the loss or a gradient is NaN or infinite, or a spike by the limits of the
                inputs, although every audit agrees, the owner's own ones included. Nothing was updated; another batch
                can be tried at the same step.
            NonFiniteLossError: The same holds of a batch with a step that was undone before.
            PeerLostError: Without a guard, a worker is gone; or a step did not end in time.
        """
        return self._loop.run_task(self._run_verified_step(step, inputs))

    @owner_task
    async def _run_verified_step(self, step: int, inputs: StepInputs) -> StepResult:
        facts, verified_step = self._facts, self._verified_step
        first_verdict, redone = len(self.all_verdicts), self.steps_redone
        await self._replace_revoked(step)
        await self._regroup_between_steps(step)
        facts.record.forget_before(step)
        if facts.ledger.step != step:
            self._context.coordinator.open_step(step)
        effort = await verified_step.verify_step(step, inputs)
        fault = verified_step.outcome.find_fault(step, inputs)
        if fault is not None:
            await verified_step.begin_again(step)
            raise fault
        return await verified_step.apply_step(step, inputs, effort, self.all_verdicts[first_verdict:], redone)

    async def _replace_revoked(self, step: int) -> None:
        """Replace parties that the owner has revoked, between two steps, before they are sent anything of the next."""
        members, roster = self._context.members, self._roster
        for entry in members.new_revocations(roster.revoked):
            newcomer = roster.revoke(entry, step)
            if newcomer is not None:
                self._newcomers.drop_newcomer(newcomer)
        while any(certified_name(name) in roster.revoked for name in roster.lost):
            await self._verified_step.recover_step(None, step)

    async def _regroup_between_steps(self, step: int) -> None:
        """Let workers in and out between two steps, and relieve slow or crowded ones; all states are agreed on then."""
        failover, leaving = self._failover, self._roster.leaving
        unsound = failover.is_unsound(step, self._pace_meter)
        if not (self._newcomers.prepared or leaving or unsound):
            return
        await self._verified_step.settle_step()
        newcomers = self._newcomers.admit_prepared()
        if newcomers or leaving or unsound:
            self._context.duplicates.abandon_duplicate("stages move")
            await failover.regroup_parties(newcomers, step, self._pace_meter)
            await self._verified_step.redo_until(step)

    # a caller that asks for weights may have switched gradients off, and audits and redone steps need them
    @torch.enable_grad()
    def settle_last_step(self) -> None:
        """Wait until the last step is verified and the states after it are agreed on; undo and redo it if need be."""
        self._loop.run_task(self._verified_step.settle_step())

    @torch.enable_grad()
    def fetch_stage(self, stage: int, purpose: Purpose) -> StageCopy:
        """Fetch a stage's state or weights, as holder and shadow signed it; a holder that withholds them is replaced.

        Raises:
            PeerLostError: Without a guard, no answer came in time.
        """
        return self._loop.run_task(self._fetch_stage(stage, purpose))

    @owner_task
    async def _fetch_stage(self, stage: int, purpose: Purpose) -> StageCopy:
        context, facts = self._context, self._facts
        while True:
            await self._verified_step.settle_step()
            holder = facts.holder_of(stage)
            if holder == OWNER:
                return context.party.roles.copy_of(stage)
            try:
                return await collect_agreed(facts, stage, purpose)
            except (PeerLostError, VerificationError) as exc:
                if not self.plan.guard.is_enabled:
                    raise
                self._roster.suspect(holder, str(exc))
                await self._verified_step.recover_step(None, facts.ledger.step)

    def fetch_stages(self, purpose: Purpose) -> Iterator[StageCopy]:
        """Every stage in order, with its verified state or weights; the owner's own are not copied."""
        for stage in range(len(self.plan.stages)):
            yield self.fetch_stage(stage, purpose)

    def begin_duplicate(self) -> Duplicate:
        """Ask all holders for copies of the state after the last step, which arrive while further steps run."""
        context = self._context
        context.party.finish_applies()
        return context.duplicates.begin_duplicate(self.next_step)

    def update_duplicate(self) -> None:
        """Mark the pending duplicate as whole, or as failed because a party is lost or too slow."""
        self._context.duplicates.update_duplicate(self._roster.lost)

    def finish_duplicate(self, duplicate: Duplicate) -> None:
        """Settle the last step, then block until the duplicate is whole or has failed."""
        self.settle_last_step()
        self._context.duplicates.note_agreed(self.next_step)
        while not (duplicate.is_whole or duplicate.failure):
            self._loop.run_turn()
            self.update_duplicate()

    @property
    def present_workers(self) -> tuple[str, ...]:
        """The workers that take part now."""
        return tuple(self._roster.alive)

    @property
    def stage_holders(self) -> Mapping[int, str]:
        """The holder of each stage now."""
        return self._facts.assignment.holders

    @property
    def stage_shadows(self) -> Mapping[int, str]:
        """The shadow of each stage now, which audits it."""
        return self._facts.assignment.shadows

    @property
    def second_shadows(self) -> Mapping[int, str]:
        """The second shadow of each stage that has one now."""
        return self._facts.assignment.second_shadows

    @property
    def next_step(self) -> int:
        """The step that is under way, or comes next: so many are applied."""
        return self._facts.ledger.step

    @property
    def microbatch_losses(self) -> tuple[float, ...]:
        """Summed losses of the microbatches of the last step, in their order, in nats."""
        stages = self._context.party.hosted
        return tuple(stages[len(self.plan.stages) - 1].losses)

    @property
    def incarnations(self) -> Incarnations:
        """Knows which parties may come back, and under which names."""
        return self._context.incarnations

    @property
    def all_verdicts(self) -> list[Verdict]:
        """All verdicts so far."""
        return self._context.verdicts.confirmed_verdicts

    @property
    def steps_redone(self) -> int:
        """How many steps were undone and done again."""
        return self._verified_step.steps_redone

    @property
    def party_usage(self) -> dict[str, dict[str, float]]:
        """Running costs that each party reported with its last applied step, CPU seconds by phase."""
        return dict(self._context.coordinator.usage)

    def take_party_phases(self) -> dict[str, dict[str, Any]]:
        """Return what no step's result has yet of `StepResult.party_phases`."""
        return self._context.coordinator.take_party_phases()

    def close(self, reason: str) -> None:
        """Tell every worker that the run is over."""
        context, ledger = self._context, self._facts.ledger
        head = context.members.witnesses.current_head()
        shutdown = Shutdown(epoch=max(ledger.epoch, 0), reason=reason, log_head=head)
        for name in self._roster.alive:
            # a worker that is gone, or ends before it has signed for this, needs no good-bye
            with contextlib.suppress(TransportError):
                context.tell([name], shutdown)
        with contextlib.suppress(TransportError):
            context.endpoint.flush_frames(2.0)


@owner_task
async def collect_agreed(facts: StepFacts, stage: int, purpose: Purpose) -> StageCopy:
    """Fetch a stage's state or weights from its holder, or from the other copy where the holder does not bring it."""
    reason: PeerLostError | VerificationError = PeerLostError(
        f"stage {stage}: {facts.holder_of(stage)} did not send its {purpose} in time"
    )
    for party in facts.assignment.parties_of(stage):
        copy = await _fetch_copy(facts, party, stage, purpose)
        if copy is not None and _is_agreed(facts, copy, purpose):
            return copy
        if copy is not None:
            reason = VerificationError(
                f"stage {stage}: {party} sent a {purpose} that differs from its signature; not used"
            )
            facts.observe("refused", {"party": party, "error": type(reason).__name__, "reason": str(reason)})
    raise reason


async def _fetch_copy(facts: StepFacts, party: str, stage: int, purpose: Purpose) -> StageCopy | None:
    copy = StageCopy.build_empty(facts.plan, stage)
    request = FetchBulk(epoch=facts.ledger.epoch, step=facts.ledger.step, stage=stage, purpose=purpose)
    tensors = await TensorsNeed(party, request, copy.state_tensors() if purpose == "state" else copy.weight_tensors())
    if tensors is None:
        return None
    if purpose == "state":
        copy.load_tensors(*tensors)
    else:
        copy.load_weights(tensors[0])
    return copy


def _is_agreed(facts: StepFacts, copy: StageCopy, purpose: Purpose) -> bool:
    agreed = facts.agreed_states.get(copy.spec.index)
    if agreed is None:
        return True
    return copy.compute_digest() == agreed if purpose == "state" else copy.weights_digest() == agreed.weights
