"""The failover (L5): after a verdict or a loss a party is excluded, others take its roles, and all begin anew."""

from collections.abc import Collection, Mapping, Sequence

from phalanx.engine import Verdict
from phalanx.errors import NoHolderError, PeerLostError, VerificationError
from phalanx.pipeline.assignment.assignment import (
    Assignment,
    roles_of,
    settle_assignment,
    shadowed_by_owner,
    stages_lacking_state,
)
from phalanx.pipeline.assignment.rebalance import PaceMeter
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.owner.context import OwnerContext
from phalanx.pipeline.owner.guarantees import Guarantees
from phalanx.pipeline.owner.kept_states import KeptStates
from phalanx.pipeline.owner.placement import Placement
from phalanx.pipeline.owner.rollback import Rollback
from phalanx.pipeline.owner.roster import Roster
from phalanx.pipeline.protocol.messages import Ask, Assign, NoiseKeys, Role, StateDigest
from phalanx.pipeline.protocol.needs import LoopTurn, ProgressNeed, owner_task
from phalanx.pipeline.verify.facts import Judgement
from phalanx.pipeline.verify.state_agreement import StateAgreement
from phalanx.pipeline.verify.state_judgement import unwitnessed_update
from phalanx.security.privacy import noise_commitment


class Failover:
    """The failover gives the stages of excluded parties to their shadows, and says from which step all go on.

    Attributes:
        rollback: Decides how far back the run can go.
        guarantees: Announces the guarantee of each stage.
    """

    def __init__(self, context: OwnerContext, roster: Roster) -> None:
        facts = context.facts
        self.rollback = Rollback(facts, KeptStates(facts, context.party.roles, context.files.run_dir))
        self.guarantees, self.placement = Guarantees(facts), Placement(facts.plan, context.members)
        self._context, self._roster = context, roster
        self._facts, self._coordinator = facts, context.coordinator
        self._agreement = StateAgreement(facts)
        self._current_assignment = facts.assignment

    @owner_task
    async def assign_first_roles(self, step: int, known: Mapping[int, StateDigest]) -> None:
        """Give out roles with known states; a party that does not take them is shut out.

        Args:
            known: Digest of each stage's state, from the model or the checkpoint.

        Raises:
            ConfigError: There is no memory for the stages, and the run has not begun yet.
            PeerLostError: No worker is left, and why each one is gone; or the owner itself is not ready in time.
            VerificationError: The owner itself has another state than the known one.
        """
        roster = self._roster
        may_be_alone = self._facts.ledger.epoch >= 0 or not roster.alive
        self._agreement = StateAgreement(self._facts, known)
        self.rollback.kept_states.begin_keeping(step, known)
        for fault in self._context.members.unreachable:
            roster.suspect(fault.peer, str(fault.error))
        while roster.lost or not await self._has_begun(step):
            if roster.lost:
                self._shut_out(roster.lost[0], convicted=False)
            if not (roster.alive or may_be_alone):
                why = "; ".join(f"{name}: {reason}" for name, reason in roster.reasons.items())
                raise PeerLostError(f"every worker was lost before the first step: {why}; see their logs")

    def is_unsound(self, step: int, balance: PaceMeter) -> bool:
        """Whether stages should move because a party is slow, or has more than it has room for."""
        old, alive, busy = self._current_assignment, self._roster.alive, self._coordinator.busy
        if balance.every and balance.is_unbalanced(step, old, alive, busy, self.placement.party_memory):
            return True
        return self.placement.is_crowded(old, alive, balance)

    @owner_task
    async def fall_back(self, step: int, known: Mapping[int, StateDigest]) -> None:
        """Begin anew from an older state with the parties that are left; one that does not come along is shut out.

        Args:
            step: The next optimizer step of that state.
            known: Digest of each stage's state in it.

        Raises:
            PeerLostError, VerificationError: The owner itself did not get ready in time, or has another state.
        """
        for judgement in self._coordinator.take_proved(self._roster.alive):
            verdict = self._context.verdicts.confirm_judgement(judgement)
            if verdict is not None:
                self._shut_out(verdict.party, convicted=True)
        # nothing that was kept of the steps since then is of this timeline
        self._facts.forget_states()
        self.rollback = Rollback(self._facts, self.rollback.kept_states)
        await self.assign_first_roles(step, known)

    async def _has_begun(self, step: int) -> bool:
        """Try to begin; False when a party that is left did not come along."""
        try:
            first = self.placement.assign_first(self._roster.alive, may_exceed=self._facts.ledger.epoch >= 0)
            await self.assign_roles(first, None, step)
        except (PeerLostError, VerificationError):
            if not self._roster.lost:
                raise
        return not self._roster.lost

    @owner_task
    async def recover_roles(self, judgement: Judgement | None, step: int) -> None:
        """Exclude a party that is guilty or gone; its shadow serves the stage and the step starts again.

        Args:
            judgement: The verdict; None when the first of `lost` is to be replaced.
            step: The step that was interrupted.
        """
        verdict = None
        if judgement is not None:
            verdict = self._context.verdicts.confirm_judgement(judgement, self._facts.unanswered)
            if verdict is None:
                await self._go_on_without_verdict(judgement, step)
                return
        await self._exclude_party(self._roster.lost.popleft() if verdict is None else verdict.party, verdict, step)

    async def _go_on_without_verdict(self, judgement: Judgement, step: int) -> None:
        """Go on where a finding does not hold: the accuser's word counts as false, and the step is done again."""
        replacement = self._context.verdicts.party_to_replace(judgement, self._facts.unanswered)
        if replacement is None or replacement[0] not in self._roster.alive:
            await self.begin_again(step)
            return
        self._roster.suspect(*replacement, "refused")
        await self.recover_roles(None, step)

    @owner_task
    async def begin_again(self, step: int) -> None:
        """Let every party keep its roles and forget its work on the step.

        Raises:
            NoHolderError, PeerLostError: As `recover_roles`, when a party is lost meanwhile.
        """
        self._coordinator.forget_audits()
        await self.assign_roles(self._current_assignment, self._current_assignment, step)

    @owner_task
    async def regroup_parties(self, newcomers: Collection[str], step: int, balance: PaceMeter) -> None:
        """Between two steps, with every state agreed on: give newcomers roles, and let those go that want to leave.

        Args:
            newcomers: Members by now, without a role.
            balance: Work of each stage, and slow parties.

        Raises:
            NoHolderError, PeerLostError: As `recover_roles`, when a party is lost meanwhile.
        """
        roster, old = self._roster, self._current_assignment
        roster.add_newcomers(newcomers, step)
        new = self.placement.assign_regrouped(
            old, [name for name in roster.alive if name not in roster.leaving], balance
        )
        moved = {str(stage): new.holders[stage] for stage in old.holders if new.holders[stage] != old.holders[stage]}
        if moved:
            self._facts.observe("stages_moved", {"step": step, "to": moved, "pace_s": dict(balance.pace)})
        await self.assign_roles(new, old, step)
        for name in [name for name in roster.leaving if name in roster.alive and name not in roster.lost]:
            if not self._current_assignment.copies_of(name):
                roster.let_go(name, step)

    async def _exclude_party(self, gone: str, verdict: Verdict | None, step: int) -> None:
        roster, old = self._roster, self._current_assignment
        roster.strike_off(gone)
        try:
            new = self.placement.assign_without(old, gone, roster.alive)
            # before the party is shut out: until roles change, the owner's own stages may still send to it
            first_bad = self.rollback.find_way_back(gone, verdict, is_distrusted=gone in roster.distrusted)
        finally:
            self._shut_out(gone, convicted=verdict is not None)
        if first_bad is not None:
            self._coordinator.forget_audits()
            self.rollback.undo_steps(first_bad, step)
        await self.assign_roles(new, old, step if first_bad is None else first_bad)
        for stage in old.held_by(gone):
            self._facts.observe("takeover", {"stage": stage, "step": step, "by": new.holders[stage], "from": gone})
        self._facts.observe("step_redone", {"step": step, "epoch": self._facts.ledger.epoch})

    def _shut_out(self, gone: str, *, convicted: bool) -> None:
        self._roster.shut_out(gone, self._current_assignment.held_by(gone), convicted=convicted)

    @owner_task
    async def assign_roles(self, new: Assignment, old: Assignment | None, step: int) -> None:
        """Begin an epoch; a party that does not take its roles is replaced, or noted in `lost` at a start.

        Args:
            new: Holders and shadows from now on.
            old: The same until now; None when all parties begin anew.

        Raises:
            PeerLostError: `old` is None and a party was lost; or the owner is not ready in time.
            VerificationError: `old` is None and a party, the owner included, has another state than the known one.
            NoHolderError: No copy of some stage goes back to `step`.
        """
        context, facts, roster = self._context, self._facts, self._roster
        members, parties, epoch = context.members, (*roster.alive, OWNER), facts.ledger.epoch + 1
        former = self.rollback.without_young_copies(old, step, parties)
        context.mail.renew_allowances()
        self._current_assignment = new
        self._coordinator.open_epoch(epoch, step, new)
        assign = Assign(
            epoch=epoch,
            step=step,
            roles=roles_of(new, former, {*parties}),
            addresses={name: members.addresses[name] for name in roster.alive},
            certificates={name: pem for name, pem in members.certificates.items() if name in roster.alive},
            log_head=members.witnesses.current_head(),
        )
        # who gets a stage's state anew has no copy that could stand where this change is interrupted
        old = old if former is None else former
        facts.sources = {role.stage: role.source for role in assign.roles}
        facts.copied |= {(role.stage, name) for role in assign.roles for name in role.newcomers}
        self._agree_on_own(new, step)
        roles = context.party.roles
        roles.use_kept_library(self.rollback.kept_library)
        self.rollback.note_copies(new, step)
        self.guarantees.note_roles(new, step)
        short = self.placement.list_shortages(new)
        if short:
            facts.observe("memory_short", {"step": step, "reason": ". ".join(short)})
        context.tell(parties, assign)
        _tell_noise_keys(context, new, parties, step)
        lacking = await self._await_ready(assign.roles, is_start=old is None)
        if roster.lost and old is None:
            raise PeerLostError(f"{roster.lost[0]} was lost: {roster.reasons[roster.lost[0]]}; see its log")
        if old is not None and (roster.lost or lacking):
            self._current_assignment = self._settle_assignment(new, old)
            await (self.recover_roles(None, step) if roster.lost else self._let_owner_shadow(lacking, step))
        elif facts.plan.guard.is_enabled:
            await self._check_ready(new, old, step)
        self.rollback.restored_step = None
        roles.use_kept_library(None)

    def _agree_on_own(self, new: Assignment, step: int) -> None:
        """Take the owner's digest as the agreed state of stages that it alone trained and now hands to workers."""
        facts, roles = self._facts, self._context.party.roles
        for stage in new.shadows:
            is_own = facts.updated_by.holders.get(stage) == facts.sources.get(stage) == OWNER
            if (
                not is_own
                or stage in facts.agreed_states
                or (stage, OWNER) in facts.copied
                or stage not in roles.hosted
            ):
                continue
            if OWNER not in new.parties_of(stage) and (copy := roles.copy_of(stage)).step_count == step:
                facts.agreed_states[stage] = copy.compute_digest()

    def _settle_assignment(self, new: Assignment, old: Assignment) -> Assignment:
        confirmed = self._agreement.confirmed_copies(self._coordinator.ready)
        return settle_assignment(new, old, {*self._roster.alive, OWNER}, confirmed)

    async def _let_owner_shadow(self, disputed: Collection[int], step: int) -> None:
        """Let the owner take the place of a party that says it lacks a state, or has it wrong."""
        stood = self._current_assignment
        await self.assign_roles(shadowed_by_owner(stood, disputed), stood, step)

    async def _await_ready(self, roles: Sequence[Role], *, is_start: bool) -> set[int]:
        """Wait until all are ready; return stages with a party that is too late and may lack another worker's state."""
        context, facts, roster, ready = self._context, self._facts, self._roster, self._coordinator.ready
        ledger, guard = facts.ledger, facts.plan.guard
        patience, timeout_s = context.patience, context.step_timeout_s
        deadline = patience.clock.wall_seconds() + timeout_s
        waiting = {*roster.alive, OWNER}
        patience.begin_attempt()
        while waiting - ready.keys() and not roster.lost:
            await LoopTurn()
            # at the very start all parties may be building a large model, later on one of them a stage
            if patience.is_beyond_any_limit and ledger.epoch:
                # one that sends or takes a state still answers, and one that hangs does not
                standings = await ProgressNeed(tuple(roster.alive), Ask(epoch=ledger.epoch, step=ledger.step))
                patience.note_probe()
                for name in [name for name in roster.alive if name not in standings][:1]:
                    roster.suspect(name, "silent while roles were assigned", "silent")
            if patience.clock.wall_seconds() > deadline:
                # the owner is late because a party does not give it a state
                missing = sorted(waiting - ready.keys() - {OWNER}) or sorted(context.party.roles.parties_awaited())
                if not missing:
                    raise PeerLostError(f"{OWNER} was not ready within {timeout_s:.0f} s")
                lacking = set[int]() if is_start or not guard.is_enabled else stages_lacking_state(missing, roles)
                if lacking:
                    return lacking
                for name in missing if is_start else missing[:1]:
                    roster.suspect(name, f"did not start its roles within {timeout_s:.0f} s", "late")
        return set()

    async def _undo_unwitnessed(self, step: int) -> None:
        """Go back over the last update of stages that one party alone has made, and let two make it again."""
        facts, unwitnessed = self._facts, self._agreement.unwitnessed
        stages = sorted(unwitnessed)
        facts.observe("update_unwitnessed", {"step": step - 1, "stages": stages})
        if not self.rollback.can_undo(step - 1):
            raise NoHolderError(
                f"stages {stages}: only one party made the update of step {step - 1}, which cannot be undone; "
                "resume from the last checkpoint with --resume"
            )
        self._coordinator.forget_audits()
        undone = {stage: unwitnessed_update(facts, stage, signed) for stage, signed in unwitnessed.items()}
        facts.unwitnessed = {stage: update for stage, update in undone.items() if update is not None}
        self.rollback.undo_steps(step - 1, step)
        await self.assign_roles(self._current_assignment, self._current_assignment, step - 1)

    async def _check_ready(self, new: Assignment, old: Assignment | None, step: int) -> None:
        """Compare the states that parties got ready with: convict one that altered a kept copy, give up others."""
        agreement, suspect = self._agreement, self._roster.suspect
        unready = agreement.agree_states(self._coordinator.ready, old)
        if old is None and unready is not None:
            if unready.party is not None:
                suspect(unready.party, unready.reason)
            raise VerificationError(unready.reason)
        for stage, states in agreement.to_weigh.items():
            self._coordinator.add_ready_states(stage, states)
        if unready is None:
            if agreement.unwitnessed:
                await self._undo_unwitnessed(step)
            return
        if old is not None:
            self._current_assignment = self._settle_assignment(new, old)
        if unready.party is None:
            self._facts.observe("state_disputed", {"step": step, "reason": unready.reason})
            await self._let_owner_shadow({unready.stage}, step)
            return
        if unready.judgement is None:
            suspect(unready.party, unready.reason)
        await self.recover_roles(unready.judgement, step)


def _tell_noise_keys(context: OwnerContext, new: Assignment, parties: Collection[str], step: int) -> None:
    """Send each party the noise keys of its stages for this epoch, and log a commitment to every key.

    Each epoch has other noise: with the same noise in two attempts, the difference of two sums would show gradients
    without noise. A run without private gradients has no keys, and nothing is sent.

    Args:
        new: Holders and shadows of the epoch, which has just been announced.
        parties: Names of all parties, the owner's included.
    """
    facts, epoch = context.facts, context.facts.ledger.epoch
    keys = {stage: facts.noise_key(epoch, stage) for stage in sorted(new.holders)}
    known = {stage: key for stage, key in keys.items() if key is not None}
    if not known:
        return
    commitments = {str(stage): noise_commitment(key) for stage, key in known.items()}
    facts.observe("noise_committed", {"epoch": epoch, "step": step, "keys": commitments})
    for name in parties:
        stages = new.copies_of(name)
        payload = memoryview(b"".join(known[stage] for stage in stages))
        context.mail.post_message(name, NoiseKeys(epoch=epoch, stages=stages), (payload,))
