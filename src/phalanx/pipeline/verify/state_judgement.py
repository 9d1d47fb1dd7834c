"""The owner's half of state checks (L3): states that a stage and its shadows must agree on, and audits by the owner."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from phalanx.errors import NoHolderError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.evidence.files import ComparedTensors
from phalanx.pipeline.evidence.weighing import GradientClaim, same_norm, weigh_gradient
from phalanx.pipeline.protocol.messages import Apply, AuditReport, GradientHeld, MessageKey, StateDigest, target_of
from phalanx.pipeline.protocol.needs import owner_task
from phalanx.pipeline.protocol.signed import WHOLE_MODEL, StatementKey
from phalanx.pipeline.protocol.tensor_stream import sent_gradient
from phalanx.pipeline.stage.runner import finite_norm_squared
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.tolerance.distance import distance_to_truth
from phalanx.pipeline.verify.facts import (
    NO_HEADERS,
    CommittedMessage,
    Judgement,
    Signed,
    StepFacts,
    StepLedger,
    UnwitnessedUpdate,
    present_headers,
)
from phalanx.pipeline.verify.gradient_bounds import GradientBounds
from phalanx.pipeline.verify.referee import NO_TENSORS, Dispute, RedoneStep, Referee, Ruling
from phalanx.planner.schedules import Direction
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers


class StateJudgement:
    """A comparison of holder and shadows; the referee redoes their disputes, whoever of them are alike."""

    def __init__(self, facts: StepFacts, referee: Referee, bounds: GradientBounds) -> None:
        self._facts = facts
        self._referee = referee
        self._bounds = bounds
        self.reported_states: dict[int, dict[str, StateDigest]] = {}
        """State digests of the present step, by stage and party."""

    def forget_reports(self) -> None:
        """Forget all reports: another step or attempt begins."""
        self.reported_states.clear()

    @owner_task
    async def weigh_states(self) -> Judgement | None:
        """Agree on each stage's state after the last optimizer step."""
        facts = self._facts
        for stage in facts.watched_stages:
            parties, reports = facts.assignment.parties_of(stage), self.reported_states.get(stage, {})
            if stage in facts.agreed_states or not reports.keys() >= {*parties}:
                continue
            signed = {party: reports[party] for party in parties}
            odd = next((party for party in parties if signed[party] != signed[parties[0]]), None)
            if odd is None:
                facts.agreed_states[stage] = signed[parties[0]]
                judgement = await self._weigh_undone(stage)
            else:
                judgement = await self._judge_state(stage, signed, odd)
            if judgement is not None:
                return judgement
        return None

    @owner_task
    async def weigh_gradients(self) -> Judgement | None:
        """Agree on each stage's weight gradient of this step, and on its norm."""
        facts, ledger = self._facts, self._facts.ledger
        for stage in facts.watched_stages:
            shadows, holder = facts.assignment.shadows_of(stage), facts.holder_of(stage)
            reports = {shadow: ledger.held[stage, shadow] for shadow in shadows if (stage, shadow) in ledger.held}
            if stage not in ledger.commits or len(reports) < len(shadows):
                continue
            if stage in ledger.gradients_agreed or stage not in facts.agreed_states:
                continue
            for shadow, report in reports.items():
                ruling = await self._judge_held(stage, shadow, report)
                if ruling is not None and ruling.party is not None:
                    what = "reported a weight gradient or norm that differs from the sent or computed one"
                    headers = gradient_headers(facts, ledger, stage)
                    headers |= {"gradient_held": facts.record.header_of(shadow, report)}
                    return self._judge_ruling(ruling, ledger.step, stage, (holder, shadow), what, headers)
            ledger.gradients_agreed.add(stage)
        return None

    def _judge_ruling(
        self,
        ruling: Ruling,
        step: int,
        stage: int,
        parties: tuple[str, str],
        what: str,
        headers: Mapping[str, Signed],
    ) -> Judgement:
        """Judge as a ruling says; `parties` are the accused and its accuser, whichever of them is which."""
        guilty = str(ruling.party)
        return self._facts.make_judgement(
            ruling.offence,
            guilty,
            stage,
            f"stage {stage}: {guilty} {what}",
            step=step,
            accuser=next(party for party in parties if party != guilty),
            headers=headers,
            work=self._referee.take_work(),
            compared=ruling.compared,
        )

    @owner_task
    async def weigh_step_audits(self) -> Judgement | None:
        """Compare each recomputed weight gradient with the stage's committed one."""
        for ledger in self._facts.open_ledgers:
            judgement = await self._weigh_recomputed(ledger)
            if judgement is not None:
                return judgement
        return None

    async def _weigh_recomputed(self, ledger: StepLedger) -> Judgement | None:
        facts = self._facts
        for stage, auditor in sorted(ledger.awaited_step_audits - ledger.steps_agreed):
            holder = facts.holder_of(stage)
            audited, commit = ledger.step_audits.get((stage, auditor)), ledger.commits[stage]
            if audited is None:
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
                claim = GradientClaim(auditor, audited.gradient, audited.norm_squared)
                ruling = await self._referee.judge_step(ledger, stage, facts.assignment, auditor, claim)
            else:
                ruling = await self._bounds.judge_gradient(ledger, stage, auditor)
            if ruling.party is None:
                facts.observe("dismissed", alarm)
                ledger.steps_agreed.add((stage, auditor))
                continue
            what = "committed to" if ruling.party == holder else "recomputed"
            what += f" a weight gradient that does not follow from the inputs of step {ledger.step}"
            headers = gradient_headers(facts, ledger, stage) | {
                "step_audited": facts.record.header_of(auditor, audited)
            }
            return self._judge_ruling(ruling, ledger.step, stage, (holder, auditor), what, headers)
        return None

    async def _judge_state(self, stage: int, signed: dict[str, StateDigest], odd: str) -> Judgement | None:
        """Redo an update about which copies differ: `odd` is the first one that is not like the holder's."""
        facts, holder = self._facts, self._facts.holder_of(stage)
        facts.observe("alarm", {"step": facts.ledger.step, "stage": stage, "kind": "state", "accuser": odd})
        before, previous = facts.previous_states.get(stage), facts.previous
        commit = None if previous is None else previous.commits.get(stage)
        if before is None or previous is None or commit is None:
            reason = f"stage {stage}: {odd} has another state than it received"
            return facts.make_judgement("transfer", odd, stage, reason, accuser=OWNER)
        gradient = (commit.gradient, previous.clip_coefficient)
        parties = facts.assignment.parties_of(stage)[::-1]
        ruling = await self._referee.judge_update(stage, parties, before, gradient, signed)
        if ruling.party is None:
            self._referee.take_work()
            facts.agreed_states[stage] = signed[holder]
            return None
        right = [state for state in signed.values() if state == ruling.state]
        if right:
            # the owner has made this update itself, and so stands for the copies that are left
            facts.agreed_states[stage] = right[0]
        what = f"has a state that does not follow from the signed gradient of step {before.step}"
        headers = update_headers(facts, stage, signed, ruling.party)
        pair = (holder, odd if ruling.party == holder else ruling.party)
        return self._judge_ruling(ruling, facts.ledger.step, stage, pair, what, headers)

    async def _weigh_undone(self, stage: int) -> Judgement | None:
        """Compare the state after an update with the one that a party signed when it had made that update alone."""
        facts, undone = self._facts, self._facts.unwitnessed.pop(stage, None)
        before, state = facts.previous_states.get(stage), facts.agreed_states[stage]
        if (
            undone is None
            or before is None
            or any(state_signed.step != state.step for state_signed in undone.signed.values())
        ):
            return None
        present = {
            party: signed_state
            for party, signed_state in undone.signed.items()
            if party in facts.present_parties and signed_state != state
        }
        if not present:
            return None
        parties = facts.assignment.parties_of(stage)[::-1]
        ruling = await self._referee.judge_update(stage, parties, before, undone.gradient, present)
        if ruling.party is None or ruling.offence == "transfer":
            return None
        reason = (
            f"stage {stage}: {ruling.party} made an update, without a second copy, that does not follow from step "
            f"{before.step}"
        )
        headers, work = undone.headers[ruling.party], self._referee.take_work()
        judgement = facts.make_judgement(
            "state", ruling.party, stage, reason, headers=headers, work=work, compared=ruling.compared
        )
        judgement.is_undone = True
        return judgement

    async def _judge_held(self, stage: int, shadow: str, held: GradientHeld) -> Ruling | None:
        """Settle what a shadow says it holds against what was committed to; None where both are the same."""
        facts, ledger, holder = self._facts, self._facts.ledger, self._facts.holder_of(stage)
        commit, alike = ledger.commits[stage], facts.bits_decide(holder, shadow)
        if commit.gradient == held.gradient and same_norm(commit.norm_squared, held.norm_squared, alike=alike):
            return None
        if facts.plan.guard.shadow_upkeep.in_lockstep:
            claim = GradientClaim(shadow, held.gradient, held.norm_squared)
            return await self._referee.judge_step(ledger, stage, facts.assignment, shadow, claim)
        if held.gradient == commit.gradient:
            return await self._referee.judge_norm(ledger, stage, holder, shadow)
        sent = sent_gradient(facts.statements, held, (holder, shadow))
        if sent is None or holder == OWNER:
            return Ruling(shadow, "gradient")
        # the parts carry the holder's own signature: what it sent is not what it committed to
        return Ruling(holder if sent == held.gradient else shadow, "gradient")


def gradient_headers(facts: StepFacts, ledger: StepLedger, stage: int) -> dict[str, Signed]:
    """Return what shows a gradient to have been signed: the commitment, and the agreed state of the stage before it."""
    state = ledger.agreed.get(stage)
    holder, shadow = facts.assignment.holders.get(stage, OWNER), facts.assignment.shadows.get(stage)
    states = NO_HEADERS if state is None else facts.state_headers(stage, state, holder, shadow)
    return {"commit": ledger.commit_header(stage), **states}


def unwitnessed_update(facts: StepFacts, stage: int, signed: Mapping[str, StateDigest]) -> UnwitnessedUpdate | None:
    """Return the record of an update before it is undone; None where nothing was committed to."""
    commit = None if facts.previous is None else facts.previous.commits.get(stage)
    if facts.previous is None or commit is None:
        return None
    gradient = (commit.gradient, facts.previous.clip_coefficient)
    headers = {party: update_headers(facts, stage, signed, party) for party in signed}
    return UnwitnessedUpdate(signed, gradient, headers)


def update_headers(facts: StepFacts, stage: int, after: Mapping[str, StateDigest], about: str) -> Mapping[str, Signed]:
    """Return what shows an update: the agreed state before it, the gradient, the decision, and the states after it.

    Args:
        facts: The step after the update.
        after: The state that each party signed.
        about: The party that is accused; where it is no shadow, the states are those of holder and auditor.
    """
    previous = facts.previous
    if previous is None:
        return NO_HEADERS
    holder, shadows = facts.updated_by.holders.get(stage, OWNER), facts.updated_by.shadows_of(stage)
    shadow = about if about in shadows else next(iter(shadows), None)
    decided = facts.record.get_statement(StatementKey(Apply.kind, OWNER, previous.epoch, previous.step, WHOLE_MODEL))
    before = facts.previous_states.get(stage)
    states = NO_HEADERS if before is None else facts.state_headers(stage, before, holder, shadow)
    return {
        "commit": previous.commit_header(stage),
        "apply": None if decided is None else decided.header,
        **{f"before_{role.removeprefix('state_')}": header for role, header in states.items()},
        **{
            role: facts.record.signed_state(party, stage, after[party])
            for role, party in (("state_holder", holder), ("state_shadow", shadow))
            if party is not None and party in after
        },
    }


def has_vouched(facts: StepFacts, stage: int, microbatch: int, direction: Direction) -> bool:
    """Whether the auditor with the other copy reported the very digest that was committed to."""
    ledger = facts.ledger
    report = ledger.reports.get((stage, microbatch, facts.shadow_of(stage)))
    said = None if report is None else report.digests.get(direction)
    return said is not None and said == ledger.messages[(stage, direction, microbatch)].digest


def judge_accomplice(facts: StepFacts, found: Judgement) -> Judgement | None:
    """The auditor that vouched for a message which was judged wrong; None when it did not."""
    verdict = found.verdict
    stage, microbatch, direction = verdict.stage, verdict.microbatch, verdict.direction
    if microbatch is None or direction is None or verdict.offence != "message":
        return None
    auditor = facts.shadow_of(stage)
    if auditor in (OWNER, verdict.accuser) or not has_vouched(facts, stage, microbatch, direction):
        return None
    where = f"stage {stage}, microbatch {microbatch}, {direction}"
    reason = f"{where}: {auditor} vouched for the wrong tensor of {verdict.party}"
    update = {"party": auditor, "offence": "collusion", "reason": reason}
    tensors = dict(found.compared.tensors)
    if "claimed" in tensors:
        tensors["accuser"] = tensors["claimed"].clone()
    shown = replace(found.compared, tensors=tensors)
    report = facts.record.header_of(auditor, facts.ledger.reports[(stage, microbatch, auditor)])
    headers = dict(found.headers) | present_headers({"report": report})
    return Judgement(verdict.model_copy(update=update), shown, headers)


def judge_gradient_accomplice(facts: StepFacts, stage: int) -> Judgement | None:
    """The auditor that claims to have recomputed a made-up weight gradient; None when it does not."""
    ledger, auditor = facts.ledger, facts.shadow_of(stage)
    lockstep = facts.plan.guard.shadow_upkeep.in_lockstep
    said = ledger.held.get((stage, auditor)) if lockstep else ledger.step_audits.get((stage, auditor))
    commit = ledger.commits[stage]
    if said is None or auditor == OWNER or (said.gradient, said.norm_squared) != (commit.gradient, commit.norm_squared):
        return None
    holder = facts.holder_of(stage)
    reason = f"stage {stage}: {auditor} vouched for the forged weight gradient of {holder} in step {ledger.step}"
    headers = {"commit": ledger.commit_header(stage), said.kind: facts.record.header_of(auditor, said)}
    return facts.make_judgement("collusion", auditor, stage, reason, headers=headers)


_Wrong = tuple[int, Direction, Mapping[Direction, str]]
"""Microbatch and direction of a message that is not what was committed to, and what the owner's own digests are."""


@dataclass(frozen=True)
class _OwnerRedoneStep:
    """A stage's step as the owner did it; waits for the state that its parties agree on after the update."""

    step: int
    copy: StageCopy
    gradients: dict[str, Tensor]
    parties: tuple[str, ...]


class OwnerAudits:
    """The owner's audits: each redoes all of a stage's step, from the agreed state to the state after the update.

    Guarantees:
        A stage and its shadows that lie together about every message of a step, about the weight gradient or
        about the update are all named in that step with probability r, the owner's rate: within
        ``ln(d) / ln(1 - r)`` such steps but for probability d. Where the stage is of another numeric class than the
        owner, messages and weight gradients count as lies beyond what rounding does; the update, in any bit.
    """

    def __init__(self, facts: StepFacts, referee: Referee, bounds: GradientBounds) -> None:
        self._facts = facts
        self._referee = referee
        self._bounds = bounds
        self._redone: dict[int, _OwnerRedoneStep] = {}

    @owner_task
    async def audit_stage(self, stage: int) -> list[Judgement]:
        """Audit a stage and return judgements, the culprit's before its accomplice's.

        The accomplice's copy reaches back far enough to undo what both did.
        """
        facts, ledger = self._facts, self._facts.ledger
        holder, parties = facts.holder_of(stage), facts.assignment.parties_of(stage)
        if holder == OWNER:
            return []
        copy = await self._referee.stage_at(stage, parties[::-1], facts.agreed_states[stage])
        if copy is None:
            return [self._judge_missing_state(stage)]
        redone = await self._referee.redo_step(copy, ledger, stage, facts.assignment)
        if redone is None:
            return [self._judge_missing_state(stage)]
        truth, wrong = redone.gradients, await self._find_wrong(stage, redone)
        # a lie that its auditor has vouched for tells of two parties
        for place in sorted(wrong, key=lambda place: not has_vouched(facts, stage, place[0], place[1])):
            named = await self._judge_wrong_message(copy, *place)
            if named:
                return named
        # what both copies apply: where bits may differ that is the stage's own gradient, once it is known to be close
        applied = truth if facts.bits_decide(holder) else await self._bounds.fetch_claimed(ledger, stage)
        if applied is None:
            return [self._judge_missing_state(stage)]
        guilty = self._compare_gradient(copy, redone, applied)
        if not guilty:
            self._redone[stage] = _OwnerRedoneStep(ledger.step, copy, applied, parties)
        return guilty

    async def _find_wrong(self, stage: int, redone: RedoneStep) -> list["_Wrong"]:
        """Return the messages of a stage that are not the committed ones."""
        messages = self._facts.ledger.messages
        digests = {place: digest_hex(tensor_buffers(y.contiguous())) for place, y in redone.outputs.items()}
        return [
            (microbatch, direction, {way: digest for (way, m), digest in digests.items() if m == microbatch})
            for (direction, microbatch), truth in redone.outputs.items()
            if messages[(stage, direction, microbatch)].digest != digests[(direction, microbatch)]
            and not await self._is_close((stage, direction, microbatch), truth)
        ]

    async def _is_close(self, key: MessageKey, truth: Tensor) -> bool:
        """Whether a message of a stage of another numeric class lies within tau of the owner's own result."""
        facts = self._facts
        if facts.bits_decide(facts.holder_of(key[0])):
            return False
        committed = await self._referee.fetch_committed(facts.ledger, key, facts.assignment, target_of(key))
        return committed is not None and distance_to_truth(committed, truth) <= facts.plan.guard.tolerance

    def forget_redone(self) -> None:
        """Let go of redone steps: the run goes back before them."""
        self._redone.clear()

    def weigh_states(self) -> list[Judgement]:
        """Compare states that were agreed on after an update with the owner's own."""
        facts = self._facts
        guilty: list[Judgement] = []
        for stage, redone in list(self._redone.items()):
            state, previous = facts.agreed_states.get(stage), facts.previous
            if facts.ledger.step == redone.step + 1 and (state is None or previous is None):
                continue
            if facts.ledger.step == redone.step and facts.ledger.audits_drawn:
                continue
            del self._redone[stage]
            if facts.ledger.step != redone.step + 1 or previous is None or state is None:
                continue
            signed = {party: state for party in redone.parties}
            ruling = self._referee.redo_update(redone.copy, redone.gradients, previous.clip_coefficient, signed)
            if ruling.party is not None:
                guilty += self._name_signers(stage, redone, state, ruling.compared)
        return guilty

    def _name_signers(
        self, stage: int, redone: _OwnerRedoneStep, state: StateDigest, compared: ComparedTensors
    ) -> list[Judgement]:
        """Name the parties that made the update, whichever of them have a copy of the stage now.

        Raises:
            NoHolderError: None of them takes part any more, so no copy leads back to before the update.
        """
        facts, guilty = self._facts, list[Judgement]()
        for party in dict.fromkeys(redone.parties):
            if party != OWNER and party in facts.present_parties:
                reason = f"stage {stage}: {party} agreed on a state that does not follow from step {redone.step}"
                headers = update_headers(facts, stage, dict.fromkeys(redone.parties, state), party)
                guilty.append(facts.make_judgement("state", party, stage, reason, headers=headers, compared=compared))
        if not guilty:
            raise NoHolderError(
                f"stage {stage}: its state after step {redone.step} is wrong, and the parties that made it are "
                "lost; resume from the last checkpoint with --resume"
            )
        return guilty

    def _judge_missing_state(self, stage: int) -> Judgement:
        holder = self._facts.holder_of(stage)
        return self._facts.make_judgement(
            "transfer", holder, stage, f"stage {stage}: no party sent the data that {holder} committed to"
        )

    async def _judge_wrong_message(
        self, copy: StageCopy, microbatch: int, direction: Direction, digests: Mapping[Direction, str]
    ) -> list[Judgement]:
        """Name the stage that sent a wrong message, and before it an auditor that reported those very bytes."""
        facts, ledger, stage = self._facts, self._facts.ledger, copy.spec.index
        inputs: dict[Direction, CommittedMessage] = {"forward": ledger.messages[(stage - 1, "forward", microbatch)]}
        if direction == "backward":
            inputs["backward"] = ledger.messages[(stage + 1, "backward", microbatch)]
        place = {"epoch": ledger.epoch, "step": ledger.step, "stage": stage, "microbatch": microbatch}
        report = AuditReport.model_validate({**place, "inputs": (), "digests": dict(digests), "order": 0})
        output = ledger.messages[(stage, direction, microbatch)]
        dispute = Dispute(report, direction, OWNER, facts.assignment, inputs, output, facts.agreed_states[stage])
        verdict, compared = await self._referee.judge_message(dispute, copy)
        work = self._referee.take_work()
        if verdict is None:
            return []
        headers = dispute.signed_headers() | present_headers(dispute.signed_states(facts))
        culprit = Judgement(verdict, compared, headers, work)
        second = judge_accomplice(facts, culprit)
        return [culprit] if second is None else [culprit, second]

    def _compare_gradient(self, copy: StageCopy, redone: RedoneStep, claimed: dict[str, Tensor]) -> list[Judgement]:
        """Convict a stage of a gradient that its work does not lead to, and a shadow that claims the same."""
        facts, ledger, stage = self._facts, self._facts.ledger, copy.spec.index
        commit, has_same_bits = ledger.commits[stage], claimed is redone.gradients
        if has_same_bits:
            claim = GradientClaim(facts.holder_of(stage), commit.gradient, commit.norm_squared)
            is_right = weigh_gradient(redone.signed_gradient, claim, None) is None
        else:
            norm = finite_norm_squared(claimed, facts.plan.numerics)
            is_right = same_norm(commit.norm_squared, norm, alike=False)
            is_right = is_right and self._bounds.is_allowed(copy, ledger.step, claimed, redone)
        if is_right:
            return []
        compared = redone.compared_tensors(copy, NO_TENSORS if has_same_bits else claimed)
        holder, step = facts.holder_of(stage), ledger.step
        reason = f"stage {stage}: {holder} committed to a weight gradient or norm that does not follow from step {step}"
        headers = gradient_headers(facts, ledger, stage)
        culprit = facts.make_judgement("gradient", holder, stage, reason, headers=headers, compared=compared)
        second = judge_gradient_accomplice(facts, stage)
        if second is None:
            return [culprit]
        second.compared, second.headers = compared, culprit.headers | second.headers
        return [culprit, second]
