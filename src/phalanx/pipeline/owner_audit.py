"""L2 by the owner itself, at a low rate: the one auditor that no worker can have on its side."""

from phalanx.pipeline.config import OWNER
from phalanx.pipeline.docket import Docket, Judgement
from phalanx.pipeline.ledger import Committed
from phalanx.pipeline.messages import AuditReport
from phalanx.pipeline.referee import Dispute, Referee
from phalanx.pipeline.schedules.action import Direction
from phalanx.security.crypto import digest_hex
from phalanx.transport.tensors import tensor_buffers


class OwnerAudits:
    """Recomputes one microbatch of a stage from committed inputs, with weights pulled against the agreed digest.

    Guarantees:
        A stage and its shadow that lie together in every microbatch are both named in a step with
        probability r, the owner's rate: within ``ln(d) / ln(1 - r)`` steps but for probability d.
        Does not find weights that both have bent together: audits of whole steps by a third party would.
    """

    def __init__(self, docket: Docket, referee: Referee) -> None:
        self._docket = docket
        self._referee = referee

    def run(self, stage: int, microbatch: int) -> list[Judgement]:
        """Audit; an accomplice is named before the culprit, so that it does not inherit the stage."""
        docket, ledger = self._docket, self._docket.ledger
        state = docket.agreed[stage]
        redone = self._referee.recompute(ledger, stage, microbatch, docket.assignment, state)
        if redone is None:
            reason = f"stage {stage}, microbatch {microbatch}: nobody brought what {docket.holder(stage)} committed to"
            return [docket.judgement("transfer", docket.holder(stage), stage, reason)]
        copy, truths = redone
        digests: dict[Direction, str] = {d: digest_hex(tensor_buffers(t.contiguous())) for d, t in truths.items()}
        inputs: dict[Direction, Committed] = {
            "forward": ledger.messages[(stage - 1, "forward", microbatch)],
            "backward": ledger.messages[(stage + 1, "backward", microbatch)],
        }
        own = AuditReport(
            epoch=ledger.epoch,
            step=ledger.step,
            stage=stage,
            microbatch=microbatch,
            inputs=(),
            digests=digests,
            urgent=False,
        )
        for direction, digest in digests.items():
            output = ledger.messages[(stage, direction, microbatch)]
            if output.digest == digest:
                continue
            dispute = Dispute(
                step=ledger.step,
                epoch=ledger.epoch,
                stage=stage,
                microbatch=microbatch,
                direction=direction,
                holder=docket.holder(stage),
                accuser=OWNER,
                holders=docket.assignment.holders,
                inputs={name: given for name, given in inputs.items() if name == "forward" or direction == "backward"},
                output=output,
                report=own,
                state=state,
            )
            verdict, exhibit = self._referee.judge_message(dispute, copy)
            if verdict is not None:
                culprit = Judgement(verdict, exhibit, dispute.headers())
                return [*self._accomplice(culprit, output), culprit]
        return []

    def _accomplice(self, culprit: Judgement, output: Committed) -> list[Judgement]:
        """An auditor that vouched for the very bytes that the stage cannot have computed."""
        verdict, docket = culprit.verdict, self._docket
        auditor = docket.shadow(verdict.stage)
        report = docket.ledger.reports.get((verdict.stage, verdict.microbatch or 0))
        said = {} if report is None else {str(name): digest for name, digest in report.digests.items()}
        if said.get(verdict.direction or "") != output.digest or not docket.same_class(auditor):
            return []
        where = f"stage {verdict.stage}, microbatch {verdict.microbatch}, {verdict.direction}"
        update = {
            "party": auditor,
            "offence": "collusion",
            "reason": f"{where}: {auditor} vouched for the wrong tensor of {verdict.party}",
        }
        tensors = dict(culprit.exhibit.tensors)
        if "claimed" in tensors:
            tensors["accuser"] = tensors["claimed"].clone()
        exhibit = type(culprit.exhibit)(tensors, culprit.exhibit.weights, culprit.exhibit.stage)
        return [Judgement(verdict.model_copy(update=update), exhibit, dict(culprit.headers))]
