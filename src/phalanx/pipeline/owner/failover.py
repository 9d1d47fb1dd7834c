"""The failover (L5): after a verdict or a loss a party is excluded, others take its roles, and all begin anew."""

import contextlib
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from phalanx.engine import Verdict
from phalanx.errors import NoHolderError, PeerLostError, TransportError, VerificationError
from phalanx.pipeline.assignment.assignment import Assignment, may_lack_a_state, roles_of, settled, shadowed_by_owner
from phalanx.pipeline.assignment.rebalance import Balance
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.membership.members import Files, Members, OwnerLinks, revocation_facts
from phalanx.pipeline.owner.coordinator import Coordinator
from phalanx.pipeline.owner.guarantees import Guarantees
from phalanx.pipeline.owner.kept_states import KeptStates
from phalanx.pipeline.owner.placement import Placement
from phalanx.pipeline.owner.rollback import Rollback
from phalanx.pipeline.owner.verdicts import Verdicts
from phalanx.pipeline.protocol.messages import Ask, Assign, NoiseKeys, Role, Shutdown, StateDigest
from phalanx.pipeline.protocol.needs import ProgressNeed, Turn, task
from phalanx.pipeline.protocol.tensor_stream import Post
from phalanx.pipeline.verify.facts import Judgement, StepFacts
from phalanx.pipeline.verify.state_agreement import StateAgreement
from phalanx.pipeline.verify.state_judgement import unwitnessed_update
from phalanx.pipeline.worker.roles import Roles
from phalanx.security.crypto import Revocation, certified_name
from phalanx.security.privacy import noise_commitment


class Failover:
    """The failover excludes parties and gives their stages to the shadows.

    Attributes:
        lost: Those among them that are known to be gone and are still to be replaced.
        reasons: Why each party that was ever lost was lost.
        leaving: Those among them that hand over at the end of the step.
        revoked: Names in the certificates that the owner has taken back in this session.
        epoch: Epoch of the present roles; -1 before the first.
        verdicts: All so far, each judged from its evidence.
        rollback: Decides how far back the run can go.
        guarantees: Announces the guarantee of each stage.
        known: Digest of each stage's state where all parties begin, from the model or the checkpoint.
        timeout_s: Longest time that taking roles may take.
    """

    def __init__(
        self,
        facts: StepFacts,
        coordinator: Coordinator,
        links: OwnerLinks,
        roles: Roles,
        members: Members,
        files: Files,
    ) -> None:
        """`roles`: the owner's own; they know from which parties it still waits for a state."""
        self.links = links
        self.alive = list(members.names)
        self.lost, self.reasons = deque[str](), dict[str, str]()
        self.leaving, self.revoked = set[str](), set[str]()
        self.epoch = -1
        self.verdicts = Verdicts(facts, members, files)
        self.takeovers = 0
        self.rollback = Rollback(facts, KeptStates(facts, roles, files.run_dir))
        self.guarantees, self.placing = Guarantees(facts), Placement(facts.plan, members)
        self.known: Mapping[int, StateDigest] = {}
        self.timeout_s = 300.0
        self._facts = facts
        self._coordinator = coordinator
        self._roles = roles
        self._members = members
        self._files = files
        self._readiness = StateAgreement(facts)
        self._is_short = False
        self._standing = facts.assignment

    @task
    async def begin(self, step: int) -> None:
        """Give out the first roles, with the states in `known`; a party that does not take them is shut out.

        Raises:
            ConfigError: There is no memory for the stages, and the run has not begun yet.
            PeerLostError: No worker is left, and why each one is gone; or the owner itself is not ready in time.
            VerificationError: The owner itself has another state than the one in `known`.
        """
        self.rollback.kept.begin(step, self.known)
        for fault in self._members.unreachable:
            self.suspect(fault.peer, str(fault.error))
        await self._begin_with_who_comes(step, may_be_alone=not self.alive)

    async def _begin_with_who_comes(self, step: int, *, may_be_alone: bool) -> None:
        while self.lost or not await self._has_begun(step):
            if self.lost:
                self._shut_out(self.lost[0], convicted=False)
            if not (self.alive or may_be_alone):
                why = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
                raise PeerLostError(f"every worker was lost before the first step: {why}; see their logs")

    def is_unsound(self, step: int, balance: Balance) -> bool:
        """Whether stages should move because a party is slow, or has more than it has room for."""
        old = self._standing
        if balance.every and balance.is_lopsided(step, old, self.alive, self._coordinator.busy, self.placing.memory):
            return True
        return self._is_short and self.placing.is_crowded(old, self.alive, balance)

    @task
    async def fall_back(self, step: int, known: Mapping[int, StateDigest]) -> None:
        """Begin anew from an older state with the parties that are left; one that does not come along is shut out.

        Args:
            step: The next optimizer step of that state.
            known: Digest of each stage's state in it.

        Raises:
            PeerLostError, VerificationError: The owner itself did not get ready in time, or has another state.
        """
        for judgement in self._coordinator.take_proved(self.alive):
            verdict = self.verdicts.judge(judgement)
            if verdict is not None:
                self._shut_out(verdict.party, convicted=True)
        # nothing that was kept of the steps since then is of this timeline
        self._facts.forget_states()
        self._readiness = StateAgreement(self._facts)
        self.rollback, self.known = Rollback(self._facts, self.rollback.kept), dict(known)
        self.rollback.kept.begin(step, known)
        await self._begin_with_who_comes(step, may_be_alone=True)

    async def _has_begun(self, step: int) -> bool:
        """Try to begin; False when a party that is left did not come along."""
        try:
            await self.assign(self.placing.first(self.alive, may_exceed=self.epoch >= 0), None, step)
        except (PeerLostError, VerificationError):
            if not self.lost:
                raise
        return not self.lost

    def suspect(self, name: str, reason: str, cause: str = "") -> None:
        """Note that a party is gone, or given up for a cause in one word; it is replaced at the next recovery.

        What it did is undone like a convict's where it was found wrong ("refused") or kept back a state that it had
        signed ("withheld").
        """
        if name in self.alive and cause in ("refused", "withheld"):
            self.rollback.distrusted.add(name)
        if name in self.alive and name not in self.lost:
            self._files.observe("link_broken", {"party": name, "reason": reason})
            if cause:
                place = {"party": name, "step": self._facts.ledger.step, "cause": cause}
                self._files.observe("replaced", {**place, "reason": reason})
            self.lost.append(name)
            self.reasons[name] = reason

    def revoke(self, entry: Revocation, step: int) -> str | None:
        """Bar a revoked party; one that takes part joins those in `lost`, the name of one about to join is returned."""
        self._files.observe("revoked", {**revocation_facts(entry), "step": step})
        self.revoked.add(entry.party)
        if (name := self.links.incarnations.bar(entry.party)) in self.alive:
            self.lost.append(name)
            self.reasons[name], name = "its certificate was revoked", None
        return name

    def probe(self) -> None:
        """Send every party a message: a link with a dead other end is found when something is to go over it."""
        self.links.tell(self.alive, Ask(epoch=self.epoch, step=self._facts.ledger.step))

    def suspect_the_dead(self) -> None:
        """Note every party with a process that has ended, and replace workers that ended before they joined."""
        for name in self.alive:
            if not self._members.is_alive(name):
                self.suspect(name, "its process has ended")
        self._members.look_after()

    @task
    async def recover(self, judgement: Judgement | None, step: int) -> None:
        """Exclude a party that is guilty or gone; its shadow serves the stage and the step starts again.

        Args:
            judgement: The verdict; None when the first of `lost` is to be replaced.
            step: The step that was interrupted.

        Raises:
            NoHolderError: Every holder of a stage is gone.
            PeerLostError: A party did not take its roles in time.
        """
        verdict = None
        if judgement is not None:
            verdict = self.verdicts.judge(judgement, self._facts.unanswered)
            if verdict is None:
                await self._go_on_without_verdict(judgement, step)
                return
        await self._exclude(self.lost.popleft() if verdict is None else verdict.party, verdict, step)

    async def _go_on_without_verdict(self, judgement: Judgement, step: int) -> None:
        """Go on where a finding does not hold: the accuser's word counts as false, and the step is done again."""
        replacement = self.verdicts.to_replace(judgement, self._facts.unanswered)
        if replacement is None or replacement[0] not in self.alive:
            await self.begin_again(step)
            return
        self.suspect(*replacement, "refused")
        await self.recover(None, step)

    @task
    async def begin_again(self, step: int) -> None:
        """Let every party keep its roles and forget what was done of the step.

        Raises:
            NoHolderError, PeerLostError: As `recover`, when a party is lost meanwhile.
        """
        self._coordinator.forget_audits()
        await self.assign(self._standing, self._standing, step)

    @task
    async def regroup(self, newcomers: Collection[str], step: int, balance: Balance) -> None:
        """Between two steps, with every state agreed on: give newcomers roles, and let those go that want to leave.

        Args:
            newcomers: Members by now, without a role.
            balance: Work of each stage, and slow parties.

        Raises:
            NoHolderError, PeerLostError: As `recover`, when a party is lost meanwhile.
        """
        self.alive += newcomers
        for name in newcomers:
            place = {"address": self._members.addresses[name], "class": self._members.class_of(name)}
            self._files.observe("party_joined", {"party": name, **place, "step": step})
        staying = [name for name in self.alive if name not in self.leaving]
        old = self._standing
        new = self.placing.regrouped(old, staying, balance)
        moved = {str(stage): new.holders[stage] for stage in old.holders if new.holders[stage] != old.holders[stage]}
        if moved:
            self._files.observe("stages_moved", {"step": step, "to": moved, "pace_s": dict(balance.pace)})
        await self.assign(new, old, step)
        for name in [name for name in self.leaving if name in self.alive and name not in self.lost]:
            if not self._standing.copies_of(name):
                self._let_go(name, step)

    async def _exclude(self, gone: str, verdict: Verdict | None, step: int) -> None:
        old = self._standing
        self._strike(gone)
        try:
            new = self.placing.without(old, gone, self.alive)
            # before the party is shut out: until roles change, the owner's own stages may still send to it
            first_bad = self.rollback.way_back(gone, verdict)
        finally:
            self._shut_out(gone, convicted=verdict is not None)
        if first_bad is not None:
            self._coordinator.forget_audits()
            self.rollback.undo(first_bad, step)
        await self.assign(new, old, step if first_bad is None else first_bad)
        for stage in old.held_by(gone):
            self.takeovers += 1
            self._files.observe("takeover", {"stage": stage, "step": step, "by": new.holders[stage], "from": gone})
        self._files.observe("step_redone", {"step": step, "epoch": self.epoch})

    def _let_go(self, name: str, step: int) -> None:
        """Say good-bye to a party that has handed over everything."""
        self._strike(name)
        with contextlib.suppress(TransportError):
            self.links.tell([name], Shutdown(epoch=self.epoch, reason="it asked to leave"))
        self.links.incarnations.ended(name, for_good=False)
        self._files.observe("left", {"party": name, "step": step})

    def _strike(self, gone: str) -> None:
        """Count on a worker no more; it may still be sent to."""
        self.alive = [name for name in self.alive if name != gone]
        self.leaving.discard(gone)
        self.lost = deque(name for name in self.lost if name != gone)

    def _shut_out(self, gone: str, *, convicted: bool) -> None:
        """Refuse a worker's messages and end its process, if it is a local one."""
        self._strike(gone)
        self.links.shut_out(gone, for_good=convicted or certified_name(gone) in self.revoked)
        self._members.dismiss(gone)
        self._files.gone.append(gone)
        place = {"party": gone, "stages": self._standing.held_by(gone), "step": self._facts.ledger.step}
        self._files.observe("evicted" if convicted else "lost", place)
        self._members.replace(gone)

    @task
    async def assign(self, new: Assignment, old: Assignment | None, step: int) -> None:
        """Begin an epoch; a party that does not take its roles is replaced, or noted in `lost` at a start.

        Args:
            new: Holders and shadows from now on.
            old: The same until now; None when all parties begin anew.

        Raises:
            PeerLostError: `old` is None and a party was lost; or the owner is not ready in time.
            VerificationError: `old` is None and a party, the owner included, has another state than the known one.
        """
        self.epoch += 1
        self.links.mail.renew_allowances()
        self._standing = new
        self._coordinator.open_epoch(self.epoch, step, new)
        assign = Assign(
            epoch=self.epoch,
            step=step,
            roles=roles_of(new, self.rollback.old_enough(old, step), {*self.alive, OWNER}),
            addresses={name: self._members.addresses[name] for name in self.alive},
            certificates={name: pem for name, pem in self._members.certificates.items() if name in self.alive},
            log_head=self._members.witnesses.head(),
        )
        if old is not None and self.rollback.restored is None:
            # who gets a stage's state anew has no copy that could stand where this change is interrupted
            old = self.rollback.old_enough(old, step)
        self._facts.sources = {role.stage: role.source for role in assign.roles}
        self._facts.copied |= {(role.stage, name) for role in assign.roles for name in role.newcomers}
        self._agree_on_own(new, step)
        self._roles.kept_library = self.rollback.kept_library
        self.rollback.note_copies(new, step)
        self.guarantees.note(new, step)
        self._is_short = bool(short := self.placing.shortages(new))
        if short:
            self._files.observe("memory_short", {"step": step, "reason": ". ".join(short)})
        self.links.tell((*self.alive, OWNER), assign)
        _tell_noise_keys(self._facts, self.links.mail.post, new, (*self.alive, OWNER), self.epoch, step)
        lacks_states = await self._await_ready(assign.roles, is_start=old is None)
        if self.lost and old is None:
            raise PeerLostError(f"{self.lost[0]} was lost: {self.reasons[self.lost[0]]}; see its log")
        if old is not None and (self.lost or lacks_states):
            self._standing = stood = self._settled(new, old)
            await (self.recover(None, step) if self.lost else self.assign(shadowed_by_owner(stood), stood, step))
        elif self._facts.plan.guard.enabled:
            await self._check_ready(new, old, step)
        self.rollback.restored = self._roles.kept_library = None

    def _agree_on_own(self, new: Assignment, step: int) -> None:
        """Agree on the state of stages that the owner alone has trained and hands on: nobody else has signed it."""
        facts = self._facts
        for stage, shadow in new.shadows.items():
            is_own = facts.updated_by.holders.get(stage) == facts.sources.get(stage) == OWNER
            if not is_own or stage in facts.agreed or (stage, OWNER) in facts.copied or stage not in self._roles.hosted:
                continue
            if OWNER not in (new.holders[stage], shadow) and (copy := self._roles.copy_of(stage)).step == step:
                facts.agreed[stage] = copy.digest()

    def _settled(self, new: Assignment, old: Assignment) -> Assignment:
        return settled(new, old, {*self.alive, OWNER}, self._readiness.confirmed(self._coordinator.ready))

    async def _await_ready(self, roles: Sequence[Role], *, is_start: bool) -> bool:
        """Wait until all are ready; return whether one is too late that may lack a state of another worker."""
        patience = self.links.patience
        deadline = patience.clock.wall() + self.timeout_s
        waiting = {*self.alive, OWNER}
        patience.begin()
        while waiting - self._coordinator.ready.keys() and not self.lost:
            await Turn()
            # at the very start all parties may be building a large model, later on one of them a stage
            if patience.too_long_for_anything and self.epoch:
                await self._suspect_the_silent()
            if patience.clock.wall() > deadline:
                # the owner is late because a party does not give it a state
                missing = sorted(waiting - self._coordinator.ready.keys() - {OWNER}) or sorted(self._roles.owed_by())
                if not missing:
                    raise PeerLostError(f"{OWNER} was not ready within {self.timeout_s:.0f} s")
                if not is_start and self._facts.plan.guard.enabled and may_lack_a_state(missing, roles):
                    return True
                for name in missing if is_start else missing[:1]:
                    self.suspect(name, f"did not start its roles within {self.timeout_s:.0f} s", "late")
        return False

    async def _suspect_the_silent(self) -> None:
        """Ask every party for a sign: one that sends or takes a state still answers, and one that hangs does not."""
        standings = await ProgressNeed(tuple(self.alive), Ask(epoch=self.epoch, step=self._facts.ledger.step))
        self.links.patience.broken()
        for name in [name for name in self.alive if name not in standings][:1]:
            self.suspect(name, "silent while roles were assigned", "silent")

    async def _undo_unwitnessed(self, step: int) -> None:
        """Go back over the last update of stages that one party alone has made, and let two make it again.

        Raises:
            NoHolderError: That step is not kept.
        """
        stages = sorted(self._readiness.unwitnessed)
        self._files.observe("update_unwitnessed", {"step": step - 1, "stages": stages})
        if not self.rollback.can_undo(step - 1):
            raise NoHolderError(
                f"stages {stages}: only one party made the update of step {step - 1}, which cannot be undone; "
                "resume from the last checkpoint with --resume"
            )
        self._coordinator.forget_audits()
        undone = {
            stage: unwitnessed_update(self._facts, stage, signed)
            for stage, signed in self._readiness.unwitnessed.items()
        }
        self._facts.unwitnessed = {stage: update for stage, update in undone.items() if update is not None}
        self.rollback.undo(step - 1, step)
        await self.assign(self._standing, self._standing, step - 1)

    async def _check_ready(self, new: Assignment, old: Assignment | None, step: int) -> None:
        """Compare the states that parties got ready with: convict one that altered a kept copy, give up others."""
        unready = self._readiness.check(self._coordinator.ready, self.known if old is None else None, old)
        if old is None and unready is not None:
            self.suspect(unready.party, unready.reason)
            raise VerificationError(unready.reason)
        for stage, states in self._readiness.to_weigh.items():
            self._coordinator.said_ready(stage, states)
        if unready is None:
            if self._readiness.unwitnessed:
                await self._undo_unwitnessed(step)
            return
        if unready.judgement is None:
            self.suspect(unready.party, unready.reason)
        if old is not None:
            self._standing = self._settled(new, old)
        await self.recover(unready.judgement, step)


def _tell_noise_keys(
    facts: StepFacts, post: Post, new: Assignment, parties: Collection[str], epoch: int, step: int
) -> None:
    """Give each party the keys of an epoch's noise on the stages that it has, and commit to all of them.

    A step that is attempted again is in another epoch, and has other noise: where weights differ, two sums under one
    noise would have their difference bare.

    Args:
        facts: Have the secret; without one nothing is said.
        new: Holders and shadows of the epoch.
        parties: All that take part, the owner included.
        epoch: The epoch, which has just been announced to them.
    """
    keys = {stage: facts.noise_key(epoch, stage) for stage in sorted(new.holders)}
    known = {stage: key for stage, key in keys.items() if key is not None}
    if not known:
        return
    commitments = {str(stage): noise_commitment(key) for stage, key in known.items()}
    facts.observe("noise_committed", {"epoch": epoch, "step": step, "keys": commitments})
    for name in parties:
        stages = new.copies_of(name)
        payload = memoryview(b"".join(known[stage] for stage in stages))
        post(name, NoiseKeys(epoch=epoch, stages=stages), (payload,))
