"""Bounds of weight gradients between parties of unequal bits: compared by parameter, within what rounding does."""

from torch import Tensor

from phalanx.pipeline.protocol.messages import FetchBulk, Purpose
from phalanx.pipeline.protocol.needs import TensorsNeed, owner_task
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.float64 import WideRunner
from phalanx.pipeline.stage.rounding import MARGIN
from phalanx.pipeline.stage.runner import StageRunner
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.tolerance.distance import gradient_distance
from phalanx.pipeline.verify.facts import StepFacts, StepLedger
from phalanx.pipeline.verify.referee import Referee, Ruling


class GradientBounds:
    """A comparison of gradients: each is fetched and checked against the digest that was signed.

    Guarantees:
        A stage with a weight gradient that is further off in any parameter than tau, and than eight times the rounding
        error of the owner's own recomputation, is named whenever its whole step is audited. Does not find a lie below
        both: `gradient_distance` defines their effect.
    """

    def __init__(self, facts: StepFacts, referee: Referee) -> None:
        self._facts = facts
        self._referee = referee

    @owner_task
    async def fetch_claimed(self, ledger: StepLedger, stage: int) -> dict[str, Tensor] | None:
        """The gradient that a stage committed to, from the other copy or from the stage; None when neither has it."""
        facts, digest = self._facts, ledger.commits[stage].gradient
        for party in (facts.shadow_of(stage), facts.holder_of(stage)):
            tensors = await self._fetch_gradient(ledger, stage, party, "gradient", digest)
            if tensors is not None:
                return tensors
        return None

    @owner_task
    async def are_close(self, ledger: StepLedger, stage: int, auditor: str) -> bool:
        """Whether a stage's committed gradient lies within tau of its auditor's recomputation."""
        claimed, audited = await self.fetch_claimed(ledger, stage), await self._fetch_audited(ledger, stage, auditor)
        if claimed is None or audited is None:
            return False
        return gradient_distance(claimed, audited) <= self._facts.plan.guard.tolerance

    @owner_task
    async def judge_gradient(self, ledger: StepLedger, stage: int, auditor: str) -> Ruling:
        """Redo a stage's step and name the party with the wrong gradient, if one is wrong."""
        facts, holder = self._facts, self._facts.holder_of(stage)
        copy = await self._referee.fetch_weights(ledger.epoch, ledger.step, stage, auditor, ledger.agreed[stage])
        if copy is None:
            return Ruling(auditor, "transfer")
        truth = await self.redo_gradient(copy.runner, ledger, stage)
        if truth is None:
            return Ruling(holder, "transfer")
        if facts.bits_decide(holder):
            holder_off = transfer_digest(truth) != ledger.commits[stage].gradient
        else:
            claimed = await self.fetch_claimed(ledger, stage)
            if claimed is None:
                return Ruling(holder, "transfer")
            holder_off = not await self.is_allowed(copy, ledger, claimed, truth)
        if holder_off:
            return Ruling(holder, "gradient")
        if facts.bits_decide(auditor):
            auditor_off = transfer_digest(truth) != ledger.step_audits[(stage, auditor)].gradient
        else:
            audited = await self._fetch_audited(ledger, stage, auditor)
            if audited is None:
                return Ruling(auditor, "transfer")
            auditor_off = not await self.is_allowed(copy, ledger, audited, truth)
        return Ruling(auditor if auditor_off else None, "gradient")

    @owner_task
    async def is_allowed(
        self,
        copy: StageCopy,
        ledger: StepLedger,
        claimed: dict[str, Tensor] | None,
        truth: dict[str, Tensor],
    ) -> bool:
        """Whether an honest party of another class may have got `claimed` where the owner got `truth`.

        Args:
            copy: The stage with which the owner has computed.
            claimed: Claimed gradient; None when no party has brought it.
        """
        if not all(bool(tensor.isfinite().all()) for tensor in truth.values()):
            # where honest numbers overflow, rounding decides which; nothing is applied of such a step
            return True
        distance = float("inf") if claimed is None else gradient_distance(claimed, truth)
        if distance <= self._facts.plan.guard.tolerance:
            return True
        exact = None if claimed is None else await self.redo_gradient(WideRunner(copy.runner), ledger, copy.spec.index)
        return exact is not None and distance <= MARGIN * gradient_distance(truth, exact)

    @owner_task
    async def redo_gradient(self, runner: StageRunner, ledger: StepLedger, stage: int) -> dict[str, Tensor] | None:
        """Recompute the weight gradient of a stage from committed inputs; None when no party brings one of them."""
        for microbatch in range(self._facts.plan.microbatches):
            tensors = await self._referee.fetch_inputs(ledger, stage, microbatch, self._facts.assignment)
            if tensors is None:
                return None
            runner.forward(ledger.step, microbatch, tensors[0])
            runner.backward(ledger.step, microbatch, tensors[1])
        return runner.take_gradients()

    async def _fetch_audited(self, ledger: StepLedger, stage: int, auditor: str) -> dict[str, Tensor] | None:
        statement = ledger.step_audits.get((stage, auditor))
        return (
            None
            if statement is None
            else await self._fetch_gradient(ledger, stage, auditor, "audited", statement.gradient)
        )

    async def _fetch_gradient(
        self, ledger: StepLedger, stage: int, party: str, purpose: Purpose, digest: str
    ) -> dict[str, Tensor] | None:
        request = FetchBulk(epoch=self._referee.epoch, step=ledger.step, stage=stage, purpose=purpose)
        expected = StageCopy.build_empty(self._facts.plan, stage).module.trainable_parameters()
        answer = await TensorsNeed(party, request, expected)
        return answer[0] if answer is not None and transfer_digest(answer[0]) == digest else None
