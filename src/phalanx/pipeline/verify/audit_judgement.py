"""The owner's comparisons of digests: of two stages about one message (L1), of a stage and its auditor (L2)."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from phalanx.errors import FrameError, SignatureError
from phalanx.pipeline.config import OWNER
from phalanx.pipeline.protocol.messages import AuditReport, Fetch, FetchReply, MessageKey, ScreenHit, target_of
from phalanx.pipeline.protocol.needs import MessageNeed, owner_task
from phalanx.pipeline.tolerance.distance import classify_distance, token_distance, token_residual
from phalanx.pipeline.tolerance.drift import DriftWatch
from phalanx.pipeline.verify.facts import CommittedMessage, Judgement, StepFacts, present_headers
from phalanx.pipeline.verify.referee import Dispute, Referee
from phalanx.planner.schedules import Direction

_BOTH: tuple[tuple[Direction, int], ...] = (("forward", 1), ("backward", -1))


def compare_links(facts: StepFacts) -> Judgement | None:
    """Compare every stage's committed outputs with the committed inputs of the adjacent ones.

    Returns:
        A judgement of the first contradiction: of a sender that equivocated, or a receiver that shows no header at all.
        Headers that the sender did not sign are found when a commitment is taken.
    """
    stages = len(facts.plan.stages)
    for source in range(stages):
        for direction, offset in _BOTH:
            target = source + offset
            if not 0 <= target < stages:
                continue
            for microbatch in range(facts.plan.microbatches):
                if facts.holder_of(source) == facts.holder_of(target) == OWNER:
                    continue
                judgement = _compare_message(facts, (source, direction, microbatch), target)
                if judgement is not None:
                    return judgement
    return None


def _compare_message(facts: StepFacts, key: MessageKey, target: int) -> Judgement | None:
    source, direction, microbatch = key
    sender, receiver = facts.holder_of(source), facts.holder_of(target)
    sent_digest, received = facts.ledger.said_digest(key), facts.ledger.messages.get(key)
    place = f"stage {source}, microbatch {microbatch}, {direction}"
    if received is None:
        reason = f"{place}: {receiver} did not commit to this input"
        headers = {"commit": facts.ledger.commit_header(target)}
        return facts.make_judgement("forgery", receiver, target, reason, headers=headers)
    if sent_digest == received.digest:
        return None
    headers = {"message": received.header, "commit": facts.ledger.commit_header(source)}
    reason = f"{place}: {sender} committed to another tensor than it sent"
    return facts.make_judgement("equivocation", sender, source, reason, accuser=receiver, headers=headers)


_SOURCES: tuple[tuple[Direction, int], ...] = (("forward", -1), ("backward", 1))


class AuditJudgement:
    """The judgement of audit reports: each leads to nothing, or to a dispute that the referee decides."""

    def __init__(self, facts: StepFacts, referee: Referee, watch: DriftWatch) -> None:
        self._watch = watch
        self.leaning_stages: set[int] = set()
        """Stages with messages that drift to one side below the tolerance: to be audited in full from now on."""
        self._facts = facts
        self._referee = referee

    @owner_task
    async def weigh_report(
        self,
        auditor: str,
        report: AuditReport,
        known: Mapping[MessageKey, CommittedMessage],
        directions: Sequence[Direction],
    ) -> Judgement | None:
        """Weigh one report.

        Args:
            report: Recomputed digests, and the inputs of the recomputation.
            known: Commitments of stage and neighbours.
            directions: Directions that it was asked to recompute.
        """
        stage, microbatch = report.stage, report.microbatch
        inputs: dict[Direction, CommittedMessage] = {}
        for direction, offset in _SOURCES:
            if (stage + offset, direction, microbatch) in known:
                inputs[direction] = known[(stage + offset, direction, microbatch)]
        judgement = self._compare_work(auditor, report, directions) or self._compare_inputs(auditor, report, inputs)
        if judgement is not None:
            return judgement
        for direction in report.digests:
            output = known.get((stage, direction, microbatch))
            if output is not None and not await self._is_output_confirmed(auditor, report, direction, output):
                state = self._facts.ledger_of(report.step).agreed[stage]
                dispute = Dispute(report, direction, auditor, self._facts.assignment, inputs, output, state)
                judgement = await self._judge_dispute(dispute)
                if judgement is not None:
                    return judgement
        return None

    @owner_task
    async def fetch_early_commitments(self, hit: ScreenHit) -> dict[MessageKey, CommittedMessage]:
        """Ask both ends of a screened message for their signed statements, before their commitments are due."""
        stage, m = hit.source, hit.microbatch
        holder = self._facts.holder_of
        wanted_messages: list[tuple[str, MessageKey]] = [
            (holder(target_of(hit.key)), hit.key),
            (holder(stage), (stage - 1, "forward", m)),
        ]
        if hit.direction == "backward":
            wanted_messages.append((holder(stage), (stage + 1, "backward", m)))
        messages = {}
        for party, key in wanted_messages:
            request = Fetch.from_key(hit.epoch, hit.step, key)
            answer = await MessageNeed(party, request)
            evidence = answer.message.evidence if answer and isinstance(answer.message, FetchReply) else None
            statement = self._facts.find_tensor(evidence, request)
            if statement is not None:
                messages[key] = CommittedMessage.from_statement(statement, party)
        return messages

    def _compare_work(self, auditor: str, report: AuditReport, directions: Sequence[Direction]) -> Judgement | None:
        """Find an auditor that leaves out a part of its order: it would let a lie through."""
        if set(report.digests) == set(directions):
            return None
        reason = (
            f"stage {report.stage}, microbatch {report.microbatch}: {auditor} reported on {sorted(report.digests)}, "
            f"asked for {sorted(directions)}"
        )
        headers = {
            "report": self._facts.record.header_of(auditor, report),
            "order": self._facts.order_header(report),
        }
        judgement = self._facts.make_judgement(
            "forgery", auditor, report.stage, reason, step=report.step, headers=headers
        )
        judgement.verdict = judgement.verdict.model_copy(update={"microbatch": report.microbatch})
        return judgement

    def _compare_inputs(
        self, auditor: str, report: AuditReport, inputs: dict[Direction, CommittedMessage]
    ) -> Judgement | None:
        """Compare headers: two of one sender for one message prove that it equivocated.

        An input that the stage itself has not shown is taken from the report, for its sender has signed it.
        """
        facts, stage = self._facts, report.stage
        for signed in report.inputs:
            topic = f"stage {stage}, microbatch {report.microbatch}"
            place = {"step": report.step, "microbatch": report.microbatch, "target": stage}
            try:
                shown = facts.open_tensor(signed, report.epoch, place)
            except (FrameError, SignatureError) as exc:
                reason = f"{topic}: {auditor} reported an input that no neighbour sent: {exc}"
                headers = {"input": signed, "report": facts.record.header_of(auditor, report)}
                return facts.make_judgement("forgery", auditor, stage, reason, step=report.step, headers=headers)
            direction, sender = shown.message.direction, shown.header.fields.sender
            committed = inputs.setdefault(direction, CommittedMessage.from_statement(shown, auditor))
            if committed.digest != shown.payload_digest:
                reason = f"{topic}: {sender} signed two different {direction} messages"
                told_headers = {"told_stage": committed.header, "told_auditor": signed}
                source = shown.message.source
                return facts.make_judgement(
                    "equivocation", sender, source, reason, step=report.step, accuser=auditor, headers=told_headers
                )
        if not inputs.keys() >= {"forward", *report.digests}:
            # whoever recomputes has them, and the stage has not shown them either
            reason = f"stage {stage}, microbatch {report.microbatch}: {auditor} shows no header of its inputs"
            return facts.make_judgement("transfer", auditor, stage, reason, step=report.step)
        return None

    async def _is_output_confirmed(
        self, auditor: str, report: AuditReport, direction: Direction, output: CommittedMessage
    ) -> bool:
        holder = self._facts.holder_of(report.stage)
        if report.digests[direction] == output.digest:
            return True
        if self._facts.bits_decide(holder, auditor):
            return False
        tensors = []
        for party, claim, digest in (
            (holder, False, output.digest),
            (auditor, True, report.digests[direction]),
        ):
            request = Fetch.from_key(
                report.epoch, report.step, (report.stage, direction, report.microbatch), claim=claim
            )
            tensor = await self._referee.signed_tensor(request, (party,), digest)
            if tensor is None:
                return False
            tensors.append(tensor)
        distance = token_distance(tensors[0], tensors[1])
        # beyond twice tau one of the two is off by more than tau; between, the referee finds it or acquits both
        if classify_distance(distance, self._facts.plan.guard.tolerance) != "honest":
            return False
        if self._facts.plan.precision == "fp32":
            # honest bf16 paths lean themselves
            self._watch_drift(report, direction, token_residual(tensors[0], tensors[1]))
        return True

    def _watch_drift(self, report: AuditReport, direction: Direction, residual: Tensor) -> None:
        drift = self._watch.add_residual(report.stage, direction, residual)
        if drift is not None:
            self.leaning_stages.add(report.stage)
            body = {"stage": drift.stage, "direction": drift.direction, "bias_sigmas": drift.bias_sigmas}
            party = self._facts.holder_of(report.stage)
            self._facts.observe("drift", {"step": report.step, "party": party, **body, "audits": drift.num_audits})

    async def _judge_dispute(self, dispute: Dispute) -> Judgement | None:
        facts, report = self._facts, dispute.report
        place: dict[str, object] = {"step": report.step, "stage": report.stage, "microbatch": report.microbatch}
        place |= {"direction": dispute.direction, "accuser": dispute.accuser}
        facts.observe("alarm", place)
        signed = {"report": facts.record.header_of(dispute.accuser, report), **dispute.signed_states(facts)}
        verdict, compared = await self._referee.judge_message(dispute)
        work = self._referee.take_work()
        if verdict is None:
            facts.observe("dismissed", {**place, "referee": work.model_dump()})
            return None
        return Judgement(verdict, compared, dispute.signed_headers() | present_headers(signed), work)
