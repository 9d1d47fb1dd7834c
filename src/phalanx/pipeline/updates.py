"""L3, the owner's half: weight gradients and states that a stage and its shadow must agree on."""

from phalanx.errors import FrameError
from phalanx.pipeline.bulk import digest_of_parts
from phalanx.pipeline.collusion import vouched_for_gradient
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.docket import Docket, Judgement
from phalanx.pipeline.followed import FollowedWeights
from phalanx.pipeline.messages import GradientHeld, StateDigest, WeightsHeld
from phalanx.pipeline.referee import Referee


class Updates:
    """Compares what holder and shadow say; where they differ, the referee redoes what they dispute."""

    def __init__(self, docket: Docket, referee: Referee) -> None:
        self._docket = docket
        self._referee = referee
        self.said: dict[int, dict[str, StateDigest]] = {}
        """State digests of the present step, by stage and party."""
        self._followed = FollowedWeights(docket, referee)

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
        """Stages whose holder has signed a state and whose shadow, which follows, has not got it; and that state."""
        docket = self._docket
        if not docket.plan.guard.verify_only:
            return {}
        return {
            stage: said[docket.holder(stage)]
            for stage, said in self.said.items()
            if stage not in docket.agreed and docket.holder(stage) in said and docket.shadow(stage) not in said
        }

    def weigh_states(self) -> Judgement | None:
        """Agree on each stage's state after the last optimizer step."""
        docket = self._docket
        for stage in docket.watched:
            holder, shadow = docket.holder(stage), docket.shadow(stage)
            said = self.said.get(stage, {})
            if stage in docket.agreed or holder not in said or shadow not in said:
                continue
            if docket.plan.guard.verify_only:
                judgement = self._followed.weigh(stage, said[holder], said[shadow])
                if judgement is not None:
                    return judgement
                docket.agreed[stage] = said[holder]
                continue
            if said[holder] == said[shadow] or not docket.same_class(holder, shadow):
                # across numeric classes the bits may differ; messages are then compared by distance
                docket.agreed[stage] = said[holder]
                continue
            judgement = self._judge_state(stage, said)
            if judgement is not None:
                return judgement
        return None

    def weigh_gradients(self) -> Judgement | None:
        """Agree on each stage's weight gradient of this step, and on its norm."""
        docket, ledger = self._docket, self._docket.ledger
        if docket.plan.guard.verify_only:
            # nobody else has the gradient: audits of whole steps alone can speak of it
            ledger.gradients_agreed |= set(docket.watched) & ledger.commits.keys()
        for stage in docket.watched:
            commit, held = ledger.commits.get(stage), ledger.held.get(stage)
            if commit is None or held is None or stage in ledger.gradients_agreed or stage not in docket.agreed:
                continue
            holder, shadow = docket.holder(stage), docket.shadow(stage)
            same = (commit.gradient, commit.norm_squared) == (held.gradient, held.norm_squared)
            if same:
                ledger.gradients_agreed.add(stage)
                continue
            guilty = self._guilty_of_gradient(stage, holder, shadow, held)
            reason = f"stage {stage}: {guilty} reported a weight gradient or norm that is not what was sent or computed"
            accuser = shadow if guilty == holder else holder
            work = self._referee.spent()
            return docket.judgement("gradient", guilty, stage, reason, accuser=accuser, work=work)
        return None

    def weigh_step_audits(self) -> Judgement | None:
        """Compare each recomputed weight gradient with the one that the stage committed to."""
        docket, ledger = self._docket, self._docket.ledger
        for stage, auditor in sorted(ledger.awaited_step_audits - ledger.steps_agreed):
            audited, commit = ledger.step_audits.get((stage, auditor)), ledger.commits[stage]
            shadow = (stage, docket.shadow(stage))
            if audited is None or shadow in ledger.awaited_step_audits - {(stage, auditor)} - ledger.step_audits.keys():
                continue
            if (audited.gradient, audited.norm_squared) == (commit.gradient, commit.norm_squared):
                ledger.steps_agreed.add((stage, auditor))
                continue
            holder = docket.holder(stage)
            alarm = {"step": ledger.step, "stage": stage, "kind": "whole_step", "accuser": auditor}
            docket.observe("alarm", alarm)
            guilty = self._referee.judge_step(ledger, stage, docket.assignment.holders, auditor, docket.agreed[stage])
            what = "committed to a weight gradient" if guilty == holder else "recomputed a weight gradient"
            reason = f"stage {stage}: {guilty} {what} that the inputs of step {ledger.step} do not lead to"
            accuser = auditor if guilty == holder else holder
            if guilty == holder and auditor != docket.shadow(stage):
                second = vouched_for_gradient(docket, stage)
                docket.proved += [] if second is None else [second]
            work = self._referee.spent()
            return docket.judgement("gradient", guilty, stage, reason, accuser=accuser, work=work)
        return None

    def _judge_state(self, stage: int, said: dict[str, StateDigest]) -> Judgement | None:
        docket = self._docket
        holder, shadow = docket.holder(stage), docket.shadow(stage)
        docket.observe("alarm", {"step": docket.ledger.step, "stage": stage, "kind": "state", "accuser": shadow})
        before, previous = docket.before.get(stage), docket.previous
        if before is None or previous is None or stage not in previous.commits:
            reason = f"stage {stage}: {shadow} has another state than the one that it was given"
            return docket.judgement("state", shadow, stage, reason, accuser=OWNER)
        if stage in previous.frozen:
            kept = before.model_copy(update={"step": before.step + 1})
            guilty = next((party for party in (holder, shadow) if said[party] != kept), None)
        else:
            gradient = (previous.commits[stage].gradient, previous.clip_coefficient)
            guilty = self._referee.judge_update(stage, holder, shadow, before, gradient, said)
        work = self._referee.spent()
        if guilty is None:
            docket.agreed[stage] = said[holder]
            return None
        reason = f"stage {stage}: {guilty} has a state that the signed gradient of step {before.step} does not lead to"
        accuser = shadow if guilty == holder else holder
        return docket.judgement("state", guilty, stage, reason, accuser=accuser, work=work)

    def _guilty_of_gradient(self, stage: int, holder: str, shadow: str, held: GradientHeld) -> str:
        docket, ledger = self._docket, self._docket.ledger
        if docket.plan.guard.shadow == "lockstep":
            return self._referee.judge_step(ledger, stage, docket.assignment.holders, shadow, docket.agreed[stage])
        if held.gradient == ledger.commits[stage].gradient:
            return self._referee.judge_norm(ledger, stage, holder, shadow)
        parts = [docket.signed_by(part, holder) for part in held.parts]
        if not parts or any(part is None for part in parts):
            return shadow
        sent = digest_of_parts([part.fields.payload_digest for part in parts if part is not None])
        # the parts carry the holder's own signature: what it sent is not what it committed to
        return holder if sent == held.gradient else shadow
