"""A check with upkeeps `update` and `snapshot` (L3): what a stage sends must have the digest that it signs."""

from torch import Tensor

from phalanx.pipeline.evidence.files import ComparedTensors
from phalanx.pipeline.evidence.weight_dispute import is_what_was_signed, part_name, sent_other_than_signed
from phalanx.pipeline.protocol.messages import Bulk, Purpose, StateDigest, WeightsHeld
from phalanx.pipeline.protocol.needs import task
from phalanx.pipeline.protocol.signed import Statement, to_signed
from phalanx.pipeline.protocol.tensor_stream import parts, whole_transfer
from phalanx.pipeline.stage.stage_copy import frozen_part
from phalanx.pipeline.verify.facts import Judgement, StepFacts, present
from phalanx.pipeline.verify.referee import Referee
from phalanx.security.crypto import digest_hex


class SentState:
    """A comparison of what a stage signed with what its shadow was sent.

    Guarantees:
        A stage that sends other weights, or another snapshot, than it signs the digest of is named, by its own
        signatures.
        Does not tell whether the update was right: the owner's audits do, at their rate.

    Attributes:
        shown: What each shadow says that it was sent after the last update, by stage.
    """

    def __init__(self, facts: StepFacts, referee: Referee) -> None:
        self.shown: dict[int, WeightsHeld] = {}
        self._facts = facts
        self._referee = referee

    @task
    async def weigh(self, stage: int, signed: StateDigest, taken: StateDigest) -> Judgement | None:
        """Compare two digests of one stage's weights, and of its moments where they were sent as well.

        Args:
            stage: The stage.
            signed: Of its holder.
            taken: Of its shadow.

        Returns:
            The guilty one of the two; None when what was sent is what was signed.
        """
        facts = self._facts
        holder, shadow = facts.holder(stage), facts.shadow(stage)
        found = self.keeps_frozen(stage, signed)
        if found is not None:
            return found
        snapshot = facts.plan.guard.keeps_snapshots
        if (signed == taken) if snapshot else (signed.weights == taken.weights):
            return None
        facts.observe("alarm", {"step": facts.ledger.step, "stage": stage, "kind": "state", "accuser": shadow})
        shown = await self._shown_tensors(stage, shadow, taken)
        sent = self._sent_parts(stage, holder, shadow)
        digests = [] if shown is None else [digest_hex(*part) for _, _, part in parts(shown)]
        is_as_sent = digests == [part.digest for part in sent]
        has_same_frozen = frozen_part(taken) == frozen_part(signed)
        if shown is None:
            reason = f"stage {stage}: {shadow} did not bring the weights that it signed to have been sent"
            return facts.judgement("transfer", shadow, stage, reason, accuser=holder)
        if not sent or not is_as_sent or not has_same_frozen:
            reason = f"stage {stage}: {shadow} has other weights than those that it was sent"
            headers = {
                "state_holder": facts.record.signed_state(holder, stage, signed),
                "state_shadow": facts.record.signed_state(shadow, stage, taken),
            }
            return facts.judgement("state", shadow, stage, reason, accuser=holder, headers=headers)
        reason = f"stage {stage}: {holder} {sent_other_than_signed(snapshot=snapshot)} whose digest it signed"
        named = {part_name(number): to_signed(part.header) for number, part in enumerate(sent)}
        named |= present({"state_holder": facts.record.signed_state(holder, stage, signed)})
        judgement = facts.judgement("state", holder, stage, reason, accuser=shadow, headers=named)
        judgement.compared = ComparedTensors(weights=taken.weights, stage=shown)
        return judgement

    def keeps_frozen(self, stage: int, signed: StateDigest) -> Judgement | None:
        """Find a holder with frozen weights that have moved: its own signatures of two steps convict it."""
        facts, before = self._facts, self._facts.before.get(stage)
        if before is None or frozen_part(signed) == frozen_part(before):
            return None
        holder = facts.holder(stage)
        reason = f"stage {stage}: {holder} signed other frozen weights than those that it began with"
        headers = {
            "before_holder": facts.record.signed_state(holder, stage, before),
            "state_holder": facts.record.signed_state(holder, stage, signed),
        }
        return facts.judgement("state", holder, stage, reason, accuser=facts.shadow(stage), headers=headers)

    async def _shown_tensors(self, stage: int, shadow: str, taken: StateDigest) -> dict[str, Tensor] | None:
        """Fetch a shadow's tensors of a stage; None when they are not what it said."""
        if self._facts.plan.guard.keeps_snapshots:
            found = await self._referee.snapshot(stage, shadow, taken.step)
            return found if found is not None and is_what_was_signed(found, taken) else None
        copy = await self._referee.weights(self._facts.ledger.epoch, taken.step, stage, shadow, taken)
        return None if copy is None else copy.trained()

    def _sent_parts(self, stage: int, holder: str, shadow: str) -> list[Statement[Bulk]]:
        """The parts of the holder's transfer, in order; none when they are not all its own."""
        shown = self.shown.get(stage)
        if shown is None:
            return []
        purpose: Purpose = "snapshot" if self._facts.plan.guard.keeps_snapshots else "update"
        about = Bulk(epoch=shown.epoch, step=shown.step, stage=stage, purpose=purpose, offset=0, total=0)
        return whole_transfer(self._facts.statements, shown.parts, about, (holder, shadow)) or []
