"""Bounds of weight gradients between parties of unequal bits: compared by parameter, within what rounding does."""

from torch import Tensor

from phalanx.pipeline.evidence.weighing import weigh_distant_gradient
from phalanx.pipeline.protocol.needs import owner_task
from phalanx.pipeline.protocol.tensor_stream import transfer_digest
from phalanx.pipeline.stage.float64 import exact_gradient
from phalanx.pipeline.stage.stage_copy import StageCopy
from phalanx.pipeline.tolerance.distance import gradient_distance
from phalanx.pipeline.verify.facts import StepFacts, StepLedger
from phalanx.pipeline.verify.referee import RedoneStep, Referee, Ruling


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
        parties = self._facts.assignment.parties_of(stage)[::-1]
        return await self._referee.fetch_gradient(parties, (stage, ledger.step), ledger.commits[stage].gradient)

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
        redone = await self._referee.redo_step(copy, ledger, stage, facts.assignment)
        if redone is None:
            return Ruling(holder, "transfer")
        for party, signed in ((holder, ledger.commits[stage]), (auditor, ledger.step_audits[(stage, auditor)])):
            if facts.bits_decide(party):
                if transfer_digest(redone.gradients) != signed.gradient:
                    return Ruling(party, "gradient", redone.compared_tensors(copy))
                continue
            claimed = (
                await self.fetch_claimed(ledger, stage)
                if party == holder
                else await self._fetch_audited(ledger, stage, auditor)
            )
            if claimed is None:
                return Ruling(party, "transfer")
            if not self.is_allowed(copy, ledger.step, claimed, redone):
                return Ruling(party, "gradient", redone.compared_tensors(copy, claimed))
        return Ruling(None, "gradient")

    def is_allowed(self, copy: StageCopy, step: int, claimed: dict[str, Tensor], redone: RedoneStep) -> bool:
        """Whether an honest party of another class may have got `claimed` where the owner got the redone gradient.

        Args:
            copy: The stage with which the owner has computed.
        """
        tolerance = self._facts.plan.guard.tolerance
        weighed = weigh_distant_gradient(
            redone.gradients,
            claimed,
            tolerance,
            lambda: exact_gradient(copy, step, redone.input_pairs, redone.noise_seeds),
        )
        return not weighed.is_off

    async def _fetch_audited(self, ledger: StepLedger, stage: int, auditor: str) -> dict[str, Tensor] | None:
        audited = ledger.step_audits.get((stage, auditor))
        if audited is None:
            return None
        return await self._referee.fetch_gradient((auditor,), (stage, ledger.step), audited.gradient, "audited")
