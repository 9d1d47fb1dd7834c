"""The owner's half of state checks (L3): weight gradients and states that a stage and its shadow must agree on."""

from phalanx.errors import FrameError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import GradientHeld, StateDigest, WeightsHeld
from phalanx.pipeline.protocol.needs import task
from phalanx.pipeline.protocol.tensor_stream import sent_gradient
from phalanx.pipeline.verify.accomplices import vouched_for_gradient
from phalanx.pipeline.verify.facts import Judgement, StepFacts, StepLedger, same_norm
from phalanx.pipeline.verify.gradient_bounds import GradientBounds
from phalanx.pipeline.verify.referee import Referee
from phalanx.pipeline.verify.sent_state import SentState


class StateJudgement:
    """A comparison of holder and shadow; where they differ, the referee redoes what they dispute."""

    def __init__(self, facts: StepFacts, referee: Referee, bounds: GradientBounds) -> None:
        self._facts = facts
        self._referee = referee
        self._bounds = bounds
        self.said: dict[int, dict[str, StateDigest]] = {}
        """State digests of the present step, by stage and party."""
        self._followed = SentState(facts, referee)

    def take(self, sender: str, held: WeightsHeld) -> None:
        """Take what a shadow says that it was sent after the last update.

        Raises:
            FrameError: It said so before, or speaks of another step.
        """
        said = self.said.setdefault(held.stage, {})
        if sender in said or held.state.step != held.step:
            raise FrameError(f"{sender!r} reported the weights of stage {held.stage} twice, or of another step")
        said[sender] = held.state
        self._followed.shown[held.stage] = held

    def forget(self) -> None:
        """Forget what was said: another step or attempt begins."""
        self.said.clear()
        self._followed.shown.clear()

    @property
    def unsent(self) -> dict[int, StateDigest]:
        """States that holders have signed and that the shadows, which follow, have not got; by stage."""
        facts = self._facts
        if not (facts.plan.guard.one_optimizer and facts.plan.guard.hands_on(facts.ledger.step)):
            return {}
        return {
            stage: said[facts.holder(stage)]
            for stage, said in self.said.items()
            if stage not in facts.agreed and facts.holder(stage) in said and facts.shadow(stage) not in said
        }

    @task
    async def weigh_states(self) -> Judgement | None:
        """Agree on each stage's state after the last optimizer step."""
        facts = self._facts
        for stage in facts.watched:
            holder, shadow = facts.holder(stage), facts.shadow(stage)
            said = self.said.get(stage, {})
            if stage in facts.agreed or holder not in said:
                continue
            if facts.plan.guard.keeps_snapshots and not facts.plan.guard.hands_on(facts.ledger.step):
                # no other party has this state; what is fetched for an audit must have the digest that was signed
                judgement = self._followed.keeps_frozen(stage, said[holder])
                if judgement is not None:
                    return judgement
                facts.agreed[stage] = said[holder]
                continue
            if shadow not in said:
                continue
            if facts.plan.guard.one_optimizer:
                judgement = await self._followed.weigh(stage, said[holder], said[shadow])
                if judgement is not None:
                    return judgement
                facts.agreed[stage] = said[holder]
                continue
            if said[holder] == said[shadow]:
                facts.agreed[stage] = said[holder]
                continue
            judgement = await self._judge_state(stage, said)
            if judgement is not None:
                return judgement
        return None

    @task
    async def weigh_gradients(self) -> Judgement | None:
        """Agree on each stage's weight gradient of this step, and on its norm."""
        facts, ledger = self._facts, self._facts.ledger
        if facts.plan.guard.one_optimizer:
            # no other party has the gradient: audits of whole steps alone can check it
            ledger.gradients_agreed |= set(facts.watched) & ledger.commits.keys()
        for stage in facts.watched:
            commit, held = ledger.commits.get(stage), ledger.held.get(stage)
            if commit is None or held is None or stage in ledger.gradients_agreed or stage not in facts.agreed:
                continue
            holder, shadow = facts.holder(stage), facts.shadow(stage)
            alike = facts.bits_decide(holder, shadow)
            if commit.gradient == held.gradient and same_norm(commit.norm_squared, held.norm_squared, alike=alike):
                ledger.gradients_agreed.add(stage)
                continue
            guilty = await self._guilty_of_gradient(stage, held)
            reason = f"stage {stage}: {guilty} reported a weight gradient or norm that is not what was sent or computed"
            accuser = shadow if guilty == holder else holder
            work = self._referee.spent()
            return facts.judgement("gradient", guilty, stage, reason, accuser=accuser, work=work)
        return None

    @task
    async def weigh_step_audits(self) -> Judgement | None:
        """Compare each recomputed weight gradient with the one that the stage committed to."""
        for ledger in self._facts.open_ledgers:
            judgement = await self._weigh_recomputed(ledger)
            if judgement is not None:
                return judgement
        return None

    async def _weigh_recomputed(self, ledger: StepLedger) -> Judgement | None:
        facts = self._facts
        for stage, auditor in sorted(ledger.awaited_step_audits - ledger.steps_agreed):
            holder, shadow = facts.holder(stage), (stage, facts.shadow(stage))
            audited, commit = ledger.step_audits.get((stage, auditor)), ledger.commits[stage]
            is_second = not facts.has_copy(auditor, stage)
            if audited is None or (is_second and shadow in ledger.awaited_step_audits - ledger.step_audits.keys()):
                continue
            is_same = audited.gradient == commit.gradient
            if not facts.bits_decide(holder, auditor):
                is_same = is_same or await self._bounds.are_close(ledger, stage, auditor)
            else:
                is_same = is_same and audited.norm_squared == commit.norm_squared
            if is_same:
                ledger.steps_agreed.add((stage, auditor))
                continue
            alarm = {"step": ledger.step, "stage": stage, "kind": "whole_step", "accuser": auditor}
            facts.observe("alarm", alarm)
            if facts.bits_decide(holder) and facts.bits_decide(auditor):
                guilty = await self._referee.judge_step(ledger, stage, facts.assignment, auditor)
            else:
                found = await self._bounds.judge(ledger, stage, auditor)
                if found is None:
                    facts.observe("dismissed", alarm)
                    ledger.steps_agreed.add((stage, auditor))
                    continue
                guilty = found
            what = "committed to a weight gradient" if guilty == holder else "recomputed a weight gradient"
            reason = f"stage {stage}: {guilty} {what} that the inputs of step {ledger.step} do not lead to"
            accuser = auditor if guilty == holder else holder
            if guilty == holder and is_second:
                second = vouched_for_gradient(facts, stage)
                facts.proved += [] if second is None else [second]
            work, step = self._referee.spent(), ledger.step
            return facts.judgement("gradient", guilty, stage, reason, step=step, accuser=accuser, work=work)
        return None

    async def _judge_state(self, stage: int, said: dict[str, StateDigest]) -> Judgement | None:
        facts = self._facts
        holder, shadow = facts.holder(stage), facts.shadow(stage)
        facts.observe("alarm", {"step": facts.ledger.step, "stage": stage, "kind": "state", "accuser": shadow})
        before, previous = facts.before.get(stage), facts.previous
        commit = None if previous is None else previous.commits.get(stage)
        if before is None or previous is None or commit is None:
            reason = f"stage {stage}: {shadow} has another state than the one that it was given"
            return facts.judgement("state", shadow, stage, reason, accuser=OWNER)
        if stage in previous.frozen:
            kept = before.model_copy(update={"step": before.step + 1})
            guilty = next((party for party in (holder, shadow) if said[party] != kept), None)
        else:
            gradient = (commit.gradient, previous.clip_coefficient)
            guilty = await self._referee.judge_update(stage, holder, shadow, before, gradient, said)
        work = self._referee.spent()
        if guilty is None:
            facts.agreed[stage] = said[holder]
            return None
        reason = f"stage {stage}: {guilty} has a state that the signed gradient of step {before.step} does not lead to"
        accuser = shadow if guilty == holder else holder
        return facts.judgement("state", guilty, stage, reason, accuser=accuser, work=work)

    async def _guilty_of_gradient(self, stage: int, held: GradientHeld) -> str:
        facts, ledger = self._facts, self._facts.ledger
        holder, shadow = facts.holder(stage), facts.shadow(stage)
        if facts.plan.guard.shadow == "lockstep":
            return await self._referee.judge_step(ledger, stage, facts.assignment, shadow)
        if held.gradient == ledger.commits[stage].gradient:
            return await self._referee.judge_norm(ledger, stage, holder, shadow)
        sent = sent_gradient(facts.statements, held, (holder, shadow))
        if sent is None or holder == OWNER:
            return shadow
        # the parts carry the holder's own signature: what it sent is not what it committed to
        return holder if sent == held.gradient else shadow
